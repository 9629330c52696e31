"""What an audit can find: every code, what it means, and what mends it.

The codes are stable: scripts may ask for them. An instance is named by its uuid, a compute by its provider's, a name by
itself.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ecomp.model.planes import Leftover

FOUND = 8
"""The exit code of an audit or a doctor that found something."""


class Code(NamedTuple):
    """One code: what it means; what `audit --fix` does about it, '' for nothing; how a person mends it otherwise.

    Of a finding `<key>` in that is its key, or each of those of which one is wrong.
    """

    meaning: str
    fix: str = ''
    how: str = ''


WRONG_KEY = 'delete the wrong one: etcdctl del <key>'
UNREADABLE = 'if no newer ecomp wrote it, delete the key: etcdctl del <key>'
UNREADABLE_REQUEST = 'eschedule destroy <instance>; of what is no uuid: etcdctl del <key>'

CODES = {
    # placement
    'provider-missing': Code(
        'a living compute is no provider', how='its ecompute registers it within a minute, else see its log'
    ),
    'inventory-missing': Code(
        'a living compute has no inventory', how='its ecompute sets it within a minute, else see its log'
    ),
    'capacity-exceeded': Code(
        'more of a class is used than there is', how='destroy some of its instances, or raise `inventory:` there'
    ),
    'allocation-orphaned': Code('an allocation nobody stands behind', fix='releases it'),
    'allocation-missing': Code('an instance lives and holds nothing', fix='claims it again, as it was requested'),
    'allocation-differs': Code(
        'an instance holds other than was requested', how='destroy it, or correct it: PUT /allocations/<instance>'
    ),
    'allocation-doubled': Code(
        'an instance holds on two computes', how='correct it with its generation: PUT /allocations/<instance>'
    ),
    # etcd
    'request-doubled': Code('an instance is requested of two computes', how=WRONG_KEY),
    'request-misplaced': Code('an instance is requested of one compute and recorded by another', how=WRONG_KEY),
    'request-missing': Code('an instance lives without a request', how='eschedule destroy <instance> removes it whole'),
    'request-ended': Code('a request of an instance that has ended', fix='deletes the request'),
    'request-unreadable': Code('a request that cannot be understood', how=UNREADABLE_REQUEST),
    'queued-unreadable': Code('a waiting request that cannot be understood', how=UNREADABLE_REQUEST),
    'queued-flavorless': Code(
        'a request waits for a flavor that is not there',
        how='eschedule flavor set it again, or eschedule destroy <instance>',
    ),
    'queued-doubled': Code('a request waits that was delivered already', 'takes it out of the queue', WRONG_KEY),
    'taker-unleased': Code('a compute is taking a request for ever', how='if it is not: etcdctl del <key>'),
    'record-missing': Code('an instance runs and has no record', how='restart its ecompute, which writes it again'),
    'record-doubled': Code('another compute has a record of it, too', how=WRONG_KEY),
    'record-unreadable': Code('a record that cannot be understood', how='etcdctl del <key>, and restart its ecompute'),
    'record-unleased': Code('the record of what has ended will stay for ever', fix='puts it on a lease'),
    'record-leased': Code(
        'the record of what lives will vanish',
        how='put it again without a lease: etcdctl get --print-value-only <key> | etcdctl put <key>',
    ),
    'booted-orphaned': Code('an address of no living instance', fix='deletes it'),
    'booted-differs': Code(
        'an address other than the recorded one', how='put the right one: etcdctl put <key> ADDRESS'
    ),
    'name-orphaned': Code('a name of no living instance', fix='deletes it', how=UNREADABLE),
    'name-missing': Code(
        'a living instance does not have its name',
        fix='gives it back',
        how='another one has it: destroy one of the two, or let both be and say the uuid of this one',
    ),
    'name-reserved': Code('a living instance has the name of a command', how='give its uuid in place of its name'),
    'group-unreadable': Code('a group that cannot be understood', how=UNREADABLE),
    'group-broken': Code('the rule of a strict group does not hold', how='destroy what is not to be there'),
    'group-orphaned': Code('a member of a group that is no living instance', fix='takes it out'),
    'group-missing': Code('a living instance is not in its group', fix='puts it in, where it is'),
    'quota-unreadable': Code('a quota that cannot be understood', how=UNREADABLE),
    'quota-differs': Code('a quota counts other than is requested', fix='counts anew'),
    'usage-differs': Code(
        "a quota counts other than placement does for its project", how='whose claim it is: openstack allocation show'
    ),
    'attempt-unleased': Code('somebody is at a request for ever', how='if nobody is: etcdctl del <key>'),
    'hostname-orphaned': Code('the host name of a compute that is not there', fix='deletes it'),
    'presence-unleased': Code('a compute says it is alive, and on no lease', how='etcdctl del <key>'),
    # computes
    'compute-silent': Code(
        'a silent compute holds claims, or may run what waits in a queue, and was not compared',
        how='bring it back (after a restore of etcd: ecompute --accept-new-etcd there); of a machine that is off for '
        'good: eschedule host forget <host> --fenced',
    ),
    'compute-mute': Code('a living compute gives no digest', how="see its ecompute's log; restart it"),
    'domain-missing': Code('an instance lives and has no domain', how='eschedule destroy <instance>'),
    'domain-off': Code('an active instance is off', how="see its ecompute's log: it has not noticed"),
    'domain-running': Code(
        'an instance runs that is recorded as off or ended', how="see its ecompute's log; virsh destroy ends it"
    ),
    'domain-differs': Code('a domain is not as its record and claim say', how='undo with virsh what its fault says'),
    'domain-undefined': Code(
        'a running domain that will vanish', how='virsh dumpxml <instance> into a file, then virsh define it'
    ),
    'domain-orphaned': Code(
        'a domain nobody asks for',
        how='after a restore of etcd: ecompute --accept-new-etcd on its host; else virsh destroy, virsh undefine; its '
        'disk is then found by the next audit',
    ),
    'domain-misplaced': Code(
        'a domain with the mark of another compute', how='stop one: virsh destroy, virsh undefine on that host'
    ),
    'domain-doubled': Code(
        'an instance has domains on two computes', how='end the wrong one: virsh destroy, virsh undefine on its host'
    ),
    'disk-missing': Code('an instance has no disk', how='eschedule destroy <instance>'),
    'base-missing': Code(
        'a disk lies on a base volume that is gone', how='put the same image file back, or eschedule destroy <instance>'
    ),
    'disk-orphaned': Code('a disk nobody asks for', fix='has its compute remove it', how='look, and remove it by hand'),
    'seed-orphaned': Code('metadata of no instance', fix='has its compute remove it'),
    'iso-orphaned': Code('a NoCloud disk of no instance', fix='has its compute remove it'),
    'reservation-orphaned': Code('an address reserved for no instance', fix='has its compute remove it'),
    'reservation-missing': Code(
        'the address of a living instance is not reserved', how='restart its ecompute, which reserves it again'
    ),
    'reservation-differs': Code(
        'another address is reserved for a living instance than its record says',
        how='virsh net-update <network> delete ip-dhcp-host, then restart its ecompute',
    ),
    'metadata-refused': Code('a guest gets no metadata', how='correct what its fault says, and reboot the guest'),
    'part-orphaned': Code('a file left half written', fix='has its compute remove it'),
    'base-differs': Code(
        'a base volume is not what was fetched',
        how='eschedule destroy the instances on it, which its ecompute named; the next of that image fetches it again',
    ),
    'dhcp-open': Code(
        'a guest can take every address of a network',
        how="virsh net-edit it: <network xmlns:dnsmasq='http://libvirt.org/schemas/network/dnsmasq/1.0'>, and before "
        "</network> <dnsmasq:options><dnsmasq:option value='dhcp-ignore=tag:!known'/></dnsmasq:options>; then virsh "
        'net-destroy and net-start it, which cuts its guests off for the second until its ecompute plugs them in again',
    ),
}


class Finding(NamedTuple):
    """One disagreement about `subject`, an instance, a compute or a name; `sentence` says which plane says what.

    `compute` is the compute it is on, '' for none; `leftover` is what --fix has that compute remove, None for nothing.
    `mendable` False means that --fix leaves this one, whatever its code says. `keys` are those of etcd that a
    person chooses from.
    """

    code: str
    subject: str
    sentence: str
    compute: str = ''
    leftover: Leftover | None = None
    mendable: bool = True
    keys: tuple[str, ...] = ()

    @property
    def fix(self) -> str:
        """What `audit --fix` does about it, '' for nothing."""
        return CODES[self.code].fix if self.mendable else ''

    @property
    def how(self) -> str:
        """How a person mends it, '' where `audit --fix` does."""
        how = '' if self.fix else CODES[self.code].how
        return how.replace('<key>', ' or '.join(map(shlex.quote, self.keys))) if self.keys else how

    def to_dict(self) -> dict[str, Any]:
        """The finding as users see it in JSON."""
        return {name: getattr(self, name) for name in ('code', 'subject', 'compute', 'sentence', 'fix', 'how')}


Revisions = Mapping[str, Mapping[str, int]]
"""{subject: {key about it: etcd's revision}}."""


def confirmed(first: Iterable[Finding], second: Iterable[Finding], revisions: Sequence[Revisions]) -> list[Finding]:
    """The findings that both looks have, word for word, and about whose subject no key changed in any of `revisions`.

    What is in work changes keys: what two planes say of it at different moments is no disagreement.
    """
    again = set(second)
    return [
        each
        for each in first
        if each in again and all(at.get(each.subject) == revisions[0].get(each.subject) for at in revisions)
    ]
