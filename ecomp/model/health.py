"""What keeps a cluster, or a host, from working, and what mends it: `eschedule doctor`, `ecompute --check`. Pure.

A check is a row: its name, and a function from the facts to what is wrong, each with its cure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import NamedTuple

from ecomp.errors import Unreachable
from ecomp.model.allocation import MICROVERSION
from ecomp.model.cluster import holes
from ecomp.model.findings import FOUND
from ecomp.model.host import CLOSED, ORPHANED, SILENT, Host

LATE = 5.0
"""Seconds by which two clocks may differ."""
SOON = timedelta(days=14)
"""Before its end a certificate is spoken of."""
LEAST_DISK = 2 * 1024**3
"""Bytes that are free where disks are made, at least: an image and what its guest writes first."""
OLDEST_LIBVIRT = 9_000_000
"""As libvirt says 9.0.0, Debian 12's: no older one was tried."""


class Ailment(NamedTuple):
    """What is wrong, and the command that mends it, or what to do. Found by the check of this name."""

    check: str
    what: str
    cure: str


Found = tuple[str, str]


@dataclass(frozen=True)
class Certificate:
    """One that we show: its file, and when it ends; None where that cannot be read."""

    path: str
    until: datetime | None


@dataclass(frozen=True, kw_only=True)
class Backends:
    """etcd and placement as this machine meets them. `told` is the file that says where they are, None without one.

    `etcd` and `placement` are their names; `no_etcd` and `no_placement` say why one gives no right answer, '' if it
    does. `ahead` is by how many seconds our clock is ahead of placement's, None where it does not say.
    """

    etcd: str
    placement: str
    told: str | None
    now: datetime
    usual: str = 'schedule.yaml'
    no_etcd: str = ''
    no_placement: str = ''
    etcd_version: str = ''
    placement_version: str = ''
    ahead: float | None = None
    certificates: tuple[Certificate, ...] = ()
    open_secrets: tuple[str, ...] = ()

    @property
    def away(self) -> bool:
        """Whether one of them gives no right answer."""
        return bool(self.no_etcd or self.no_placement)


@dataclass(frozen=True)
class ComputeFacts:
    """The computes, and which version of ecomp each living one runs.

    `unserved` says that something waits in a queue, and nobody takes from it: what is wrong, a colon, and its cure.
    """

    hosts: tuple[Host, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    ours: str = ''
    unserved: str | None = None


def _no_etcd(facts: Backends) -> Iterator[Found]:
    if facts.no_etcd:
        yield facts.no_etcd, _right('etcd', facts.no_etcd, facts)


def _no_placement(facts: Backends) -> Iterator[Found]:
    if facts.no_placement:
        yield facts.no_placement, _right('placement', facts.no_placement, facts)


def _right(section: str, why: str, facts: Backends) -> str:
    # The words of ecomp/store/reasons.py and ecomp/tls.py: it is there, and found.
    if 'is the clock right?' in why:
        return 'timedatectl set-ntp true, here and on the control host'
    if 'its certificate has expired' in why:
        return 'elab certs DIR, on the control host; and see that this clock is right'
    # Not where it is asked whether ours is taken: whoever hangs up may as well be on its way down.
    if any(each in why for each in ('refuses our certificate', 'that our certificate', 'a certificate of ours')):
        return f'elab certs DIR, on the control host; copy what it makes here, and name it in `{section}:`'
    if facts.told is None:
        return f'no {facts.usual} was found, so localhost was guessed: name one with --config or in ECOMP_CONFIG'
    return f'{facts.told} told where it is: start it there, or correct `{section}:`'


def _etcd_version(facts: Backends) -> Iterator[Found]:
    said = holes(facts.etcd_version)
    if said is not None:
        what, _, cure = said.partition(': ')
        yield what, f'install one that is mended: {cure}'


def _placement_version(facts: Backends) -> Iterator[Found]:
    if not facts.placement_version:
        return
    try:
        major, minor = (int(part) for part in facts.placement_version.split('.'))
    except ValueError:
        major, minor = 0, 0
    if (major, minor) < MICROVERSION:
        needed = '.'.join(map(str, MICROVERSION))
        what = f'{facts.placement} has microversion {facts.placement_version}, and {needed} is asked for'
        yield what, "pip install 'openstack-placement>=7.0.0' where it runs, and restart it"


def _clock(facts: Backends) -> Iterator[Found]:
    if facts.ahead is not None and abs(facts.ahead) > LATE:
        which = 'ahead of' if facts.ahead > 0 else 'behind'
        what = f"this machine's clock is {abs(facts.ahead):.0f} s {which} that of {facts.placement}"
        yield what, 'timedatectl set-ntp true, on the one that is wrong'


def _certificates(facts: Backends) -> Iterator[Found]:
    for each in facts.certificates:
        cure = 'have it made anew: elab certs DIR, on the control host, and copy it here'
        if each.until is None:
            yield f'{each.path} cannot be read as a certificate', cure
        elif each.until <= facts.now:
            yield f'{each.path} has expired, {each.until:%Y-%m-%d %H:%M} UTC', cure
        elif each.until <= facts.now + SOON:
            yield f'{each.path} expires soon, {each.until:%Y-%m-%d %H:%M} UTC', cure


def _secrets(facts: Backends) -> Iterator[Found]:
    for path in facts.open_secrets:
        yield f'{path} can be read or changed by every user of this machine', f'chmod o= {path}'


def _computes(facts: ComputeFacts) -> Iterator[Found]:
    for each in facts.hosts:
        name = each.hostname or each.compute
        if each.state == SILENT:
            where = f'systemctl restart ecompute on its host; gone for good: eschedule host forget {each.compute}'
            yield f'compute {name} is silent: nothing says that its ecompute lives', where
        elif each.state == CLOSED:
            why = 'its ecompute was stopped, or it only watches, for etcd is not the one that it knew'
            where = 'systemctl start ecompute on its host; where that runs, journalctl -u ecompute says why'
            yield f'compute {name} is closed: {why}', where
        elif each.state == ORPHANED:
            gone = f'gone for good: eschedule host forget {each.compute}'
            where = f'start its ecompute (after a restore of etcd: ecompute --accept-new-etcd); {gone}'
            yield f'compute {name} is orphaned: placement knows it alone', where


def _versions(facts: ComputeFacts) -> Iterator[Found]:
    for each in facts.hosts:
        version = facts.versions.get(each.compute, facts.ours)
        if version != facts.ours:
            what = f'compute {each.hostname or each.compute} runs ecomp {version}, and this is {facts.ours}'
            # Not by its name: the ecomp that pip finds by that is not this one.
            if _parts(version) < _parts(facts.ours):
                clone = f'on its host, in a clone of ecomp {facts.ours}'
                # Stopped first: workers that it begins meanwhile would be of the new version, and it of the old one.
                steps = "systemctl stop ecompute; /opt/ecomp/bin/pip install '.[hypervisor]'; systemctl start ecompute"
                yield what, f'{clone}: {steps} (docs/howto/upgrade.md)'
            else:
                clone = f'here, in a clone of ecomp {version}'
                yield what, f'{clone}: pipx install --force ., or pip install . in its virtual environment'


def _queue(facts: ComputeFacts) -> Iterator[Found]:
    if facts.unserved is not None:
        what, _, cure = facts.unserved.partition(': ')
        yield what, cure or '`queues: True` in the compute.yaml of one, and restart its ecompute'


def _parts(version: str) -> list[int]:
    return [int(part) for part in version.split('.') if part.isdecimal()]


OF_BACKENDS: Mapping[str, Callable[[Backends], Iterable[Found]]] = {
    'etcd': _no_etcd,
    'placement': _no_placement,
    'etcd-version': _etcd_version,
    'placement-version': _placement_version,
    'clock': _clock,
    'certificate': _certificates,
    'secret': _secrets,
}
OF_COMPUTES: Mapping[str, Callable[[ComputeFacts], Iterable[Found]]] = {
    'compute': _computes,
    'version': _versions,
    'queue': _queue,
}


def of_backends(facts: Backends) -> list[Ailment]:
    """What is wrong with etcd and placement, or with the way to them."""
    return [Ailment(name, *found) for name, look in OF_BACKENDS.items() for found in look(facts)]


def of_computes(facts: ComputeFacts) -> list[Ailment]:
    """What is wrong with computes, as far as it is seen from here."""
    return [Ailment(name, *found) for name, look in OF_COMPUTES.items() for found in look(facts)]


def lines(found: Sequence[Ailment]) -> list[str]:
    """Each as one line: the check, what is wrong, and what mends it."""
    return [f'{each.check}: {each.what}. Mend it: {each.cure}' for each in found]


def summary(facts: Backends, found: Sequence[Ailment]) -> str:
    """Who was asked, and how much was found, as one line."""
    etcd = 'no answer' if facts.no_etcd else facts.etcd_version
    placement = 'no answer' if facts.no_placement else f'microversion {facts.placement_version}'
    how_many = f'{len(found)} finding{"" if len(found) == 1 else "s"}' if found else 'nothing is wrong'
    told = facts.told or f'no {facts.usual}'
    return f'{how_many}; {facts.etcd} ({etcd}), {facts.placement} ({placement}), by {told}'


def exit_code(facts: Backends, found: Sequence[Ailment]) -> int:
    """0 where nothing is wrong, 7 where etcd or placement is away, 8 for any other finding."""
    return Unreachable.exit_code if facts.away else FOUND if found else 0
