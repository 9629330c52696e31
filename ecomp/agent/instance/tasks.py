"""What carries out each kind of task: a row a kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from ecomp.agent.instance.instances import Instances
from ecomp.agent.instance.plan import Kind, Task, Wish
from ecomp.model.guest import Address, Guest
from ecomp.model.instance import Invalid, Request


class Work(NamedTuple):
    """A task with its wish as planned: by the time a thread is free, the key may have been deleted.

    `revision` is that of the request's key, `guest` what is there of it, `addresses` are by MAC.
    """

    task: Task
    revision: int
    wish: Wish
    guest: Guest | None
    addresses: Mapping[str, Address]

    @property
    def instance(self) -> str:
        """The instance that the task is about."""
        return self.task.instance

    @property
    def request(self) -> Request:
        """The wish, of a kind of task that plan() makes of nothing else."""
        assert isinstance(self.wish, Request)
        return self.wish

    @property
    def refused(self) -> Invalid:
        """The wish, of a task that refuses it."""
        assert isinstance(self.wish, Invalid)
        return self.wish


CARRIED_OUT: Mapping[Kind, Callable[[Instances, Work], None]] = MappingProxyType({
    Kind.BUILD: lambda instances, work: instances.build(work.request, work.revision, work.guest),
    Kind.DESTROY: lambda instances, work: instances.destroy(work.request, work.revision),
    Kind.REFUSE: lambda instances, work: instances.refuse(work.refused, work.revision, work.guest),
    Kind.CLEAR: lambda instances, work: instances.clear(work.instance, work.revision, work.task.reason),
    Kind.VANISHED: lambda instances, work: instances.vanished(work.instance, work.revision),
    Kind.ADDRESS: lambda instances, work: instances.address(work.instance, work.revision, work.addresses),
    Kind.READY: lambda instances, work: instances.ready(work.instance, work.revision),
    Kind.POWER: lambda instances, work: instances.switch.note(work.instance, work.revision, work.guest),
    Kind.RESUME: lambda instances, work: instances.switch.resume(work.instance, work.revision),
    Kind.SHUTDOWN: lambda instances, work: instances.switch.shut_down(work.request, work.revision),
    Kind.SWITCH_OFF: lambda instances, work: instances.switch.switch_off(work.request, work.revision),
    Kind.START: lambda instances, work: instances.switch.start(work.request, work.revision),
    Kind.DONE: lambda instances, work: instances.switch.done(work.request, work.revision, work.guest),
})
"""All but Kind.REPORT, which is said and changes nothing. Errors: those of Instances."""
