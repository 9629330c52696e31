"""What one guest is told at which path. Pure: a guest and a path in, the body out.

Two trees, both answered with and without trailing slashes:

    /2009-04-04/…  /latest/…   EC2's, as Cirros and cloud-init's Ec2 source crawl it
    /seed/<uuid>/…             NoCloud's, the one current cloud images find (SMBIOS serial `ds=nocloud-net;s=…`);
                               the same files can be put on a disk for the guest: seed()

and a third that is posted to: /phone-home/<uuid>/, by cloud-init's module of that name, when all else has run.

A body has no newline at its end: cloud-init takes an EC2 value with a newline in it for a list of values.

Sources: Amazon's "Instance metadata" user guide; cloud-init's `sources/helpers/ec2.py` (an index entry that ends in "/"
is a directory, `0=name` stands for `0/openssh-key`), `DataSourceNoCloud.py`, `util.read_seeded`,
`cc_phone_home.py`; Cirros' `ds/ec2`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

VERSIONS = ('2009-04-04', 'latest')

Tree = Mapping[str, 'bytes | Tree']


@dataclass(frozen=True)
class Guest:
    """All there is to tell one guest, defaults filled in.

    `instance` is its uuid, `address` the IPv4 address it asks from, `public_keys` (name, OpenSSH line) with unique
    names, `user_data` and `network_config` None when there is none.
    """

    instance: str
    address: str
    hostname: str
    public_keys: tuple[tuple[str, str], ...] = ()
    user_data: bytes | None = None
    network_config: Mapping[str, Any] | None = None


def versions() -> bytes:
    """The body of `/`: the same for everybody, so that anybody can see that a metadata server answers."""
    return '\n'.join(VERSIONS).encode()


def answer(path: str, guest: Guest) -> bytes | None:
    """The body for this guest at this path, None where there is nothing (404)."""
    # Empty steps are dropped: a trailing slash means nothing, and the clients of 2019 ask for `public-keys//0`.
    match [step for step in path.split('/') if step]:
        case []:
            return versions()
        case [version, *steps] if version in VERSIONS:
            return _look_up(_ec2(guest), steps)
        # Its own seed only; no other uuid is said to exist.
        case ['seed', instance, *steps] if instance == guest.instance:
            return _look_up(_seed(guest, {'dsmode': 'net'}), steps)
    return None


def _ec2(guest: Guest) -> Tree:
    hostname = guest.hostname.encode()
    meta_data: dict[str, bytes | Tree] = {
        'hostname': hostname,
        'instance-id': guest.instance.encode(),
        'local-hostname': hostname,
        'local-ipv4': guest.address.encode(),
    }
    # What is listed must answer, or cloud-init drops all of meta-data: without keys there is no `public-keys`.
    if guest.public_keys:
        meta_data['public-keys/'] = {
            f'{number}={name}': {'openssh-key': key.encode()} for number, (name, key) in enumerate(guest.public_keys)
        }
    tree: dict[str, bytes | Tree] = {'meta-data': meta_data}
    # EC2 says "no user-data" by 404; an empty body would be a script that fails.
    if guest.user_data is not None:
        tree['user-data'] = guest.user_data
    return tree


def seed(guest: Guest, phones_home: bool) -> dict[str, bytes]:
    """The files of a NoCloud disk of this guest's own, by name; those that have nothing to say are left out.

    With `phones_home` its vendor-data asks it to say when it is through: somebody has to listen there.
    """
    files = _seed(guest, {})
    if not phones_home:
        del files['vendor-data']
    # cloud-init takes no disk for a seed that lacks one of the first two.
    return {name: body for name, body in files.items() if body or name in ('meta-data', 'user-data')}


def _seed(guest: Guest, extra: Mapping[str, str]) -> dict[str, bytes]:
    # cloud-init 22.4 drops a seed found by SMBIOS as "local" unless its meta-data says `dsmode: net`; one on a disk is
    # to be taken before there is a network.
    meta_data = {
        'instance-id': guest.instance,
        'local-hostname': guest.hostname,
        'public-keys': [key for _, key in guest.public_keys],
        **extra,
    }
    return {
        'meta-data': _yaml(meta_data),
        'user-data': guest.user_data or b'',
        'vendor-data': _vendor_data(guest.instance),
        # Empty is "none". A 404 would be asked for ten more times, a second apart, by cloud-init 24.3 and newer.
        'network-config': _yaml(guest.network_config) if guest.network_config else b'',
    }


def _yaml(data: Mapping[str, Any]) -> bytes:
    # JSON is YAML as long as it is not \u-escaped: YAML knows no surrogate pairs.
    return json.dumps(data, ensure_ascii=False, indent=1).encode()


def phone_home(instance: str) -> str:
    """The path at which a guest says that its cloud-init is through."""
    return f'/phone-home/{instance}/'


def _vendor_data(instance: str) -> bytes:
    # phone_home is the last of cloud-init's modules. What it would send besides, the host's keys, nobody needs. JSON is
    # YAML; a user's own phone_home takes its place.
    asked = {'url': f'http://169.254.169.254{phone_home(instance)}', 'post': ['instance_id'], 'tries': 10}
    return f'#cloud-config\nphone_home: {json.dumps(asked)}'.encode()


def _look_up(tree: Tree, steps: list[str]) -> bytes | None:
    """Walk the tree. A name is listed whole and asked for without what follows a `/` or `=` in it."""
    node: bytes | Tree = tree
    for step in steps:
        if isinstance(node, bytes):
            return None
        asked = {name.split('=')[0].rstrip('/'): name for name in node}
        if step not in asked:
            return None
        node = node[asked[step]]
    return node if isinstance(node, bytes) else '\n'.join(node).encode()
