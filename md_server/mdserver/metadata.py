"""What one guest is told at which path. Pure: a guest and a path in, the body out.

Two trees, both answered with and without trailing slashes:

    /2009-04-04/…  /latest/…   EC2's, as Cirros and cloud-init's Ec2 source crawl it
    /seed/<uuid>/…             NoCloud's, the one current cloud images find (SMBIOS serial `ds=nocloud-net;s=…`);
                               the same files can be put on a disk for the guest: seed()

and a third that is posted to: /phone-home/<uuid>/, by a script in vendor-data, when cloud-init is through. What is
posted is a form as cloud-init's phone_home has it, pub_key_ed25519 and its like, and beside that stage and error.

A body has no newline at its end: cloud-init takes an EC2 value with a newline in it for a list of values.

Sources: Amazon's "Instance metadata" user guide; cloud-init's `sources/helpers/ec2.py` (an index entry that ends in "/"
is a directory, `0=name` stands for `0/openssh-key`), `DataSourceNoCloud.py`, `util.read_seeded`,
`cc_phone_home.py`, `cc_scripts_vendor.py`, `cmd/main.py` (status.json, result.json, manual-clean); Cirros' `ds/ec2`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

from mdserver.guests import Guest

VERSIONS = ('2009-04-04', 'latest')

FIELDS = 32
"""Of a posted form; one with more is refused."""
HOST_KEYS = ('pub_key_ed25519', 'pub_key_ecdsa', 'pub_key_rsa')
"""The fields of the form that are host keys: what sshd makes today. Others are passed over."""

REPORT = """\
#!/bin/sh
# Tells the host what became of cloud-init, and which keys sshd has. It waits in the background until cloud-init ends.
python=$(sed -n '1s/^#! *//p' "$(command -v cloud-init)")
exec ${python:-python3} - "$0" <<'END'
import glob, json, os, shutil, sys, time
from urllib import parse, request

if os.fork():
    os._exit(0)
os.setsid()
null = os.open(os.devnull, os.O_RDWR)
for number in range(3):
    os.dup2(null, number)

RUN = '/run/cloud-init/'
for _ in range(5 * 24 * 3600):
    if os.path.exists(RUN + 'result.json'):
        break
    time.sleep(0.2)
with open(RUN + 'status.json') as file:
    stages = json.load(file)['v1']
said = {}
for stage in ('init-local', 'init', 'modules-config', 'modules-final'):
    errors = (stages.get(stage) or {}).get('errors')
    if errors:
        said.update(stage=stage, error='; '.join(map(str, errors))[:500])
        break
for kind in ('ed25519', 'ecdsa', 'rsa'):
    for name in glob.glob('/etc/ssh/ssh_host_%s_key.pub' % kind):
        with open(name) as file:
            said['pub_key_' + kind] = ' '.join(file.read().split()[:2])
# What is in vendor-data cloud-init runs once, and what is there at each boot.
PER_BOOT = '/var/lib/cloud/scripts/per-boot/'
try:
    if not sys.argv[1].startswith(PER_BOOT):
        os.makedirs(PER_BOOT, exist_ok=True)
        # Half of it, after a power cut, would be an error at each boot. So it comes there whole, from the next folder.
        half = os.path.dirname(PER_BOOT.rstrip('/')) + '/ecomp-report.half'
        shutil.copy(sys.argv[1], half)
        with open(half) as file:
            os.fsync(file.fileno())
        os.replace(half, PER_BOOT + 'ecomp-report')
        directory = os.open(PER_BOOT, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)
except OSError:
    pass
# A boot at which no metadata server answers is another instance's to cloud-init, and it makes sshd's keys anew. With
# this file it keeps what it knows of ours. Only in the guest that was told by network: a copy of its disk is to be new.
KEEP = '/var/lib/cloud/instances/INSTANCE/manual-clean'
try:
    with open('/sys/class/dmi/id/product_serial') as file:
        serial = file.read()
    if 'SEED' in serial:
        open(KEEP, 'a').close()
    elif os.path.exists(KEEP):
        os.remove(KEEP)
except OSError:
    pass
home = request.build_opener(request.ProxyHandler({}))
for pause in (1, 2, 4, 8, 15, 30, 60, 0):
    try:
        home.open('URL', parse.urlencode(said).encode(), 10)
        break
    except OSError:
        time.sleep(pause)
END
"""
"""The vendor-data, with INSTANCE, URL for where to post, and SEED for what its SMBIOS serial names if told by network.

cloud-init runs it as a script, once; for later boots it copies itself.

Not phone_home, cloud-init's module for this: it comes before the end, does not know of failures, and warns in the
guest's log of each kind of key that is not there. A script is not in the way of the user's own cloud-config either.
"""

Tree = Mapping[str, 'bytes | Tree']


def versions() -> bytes:
    """The body of `/`, the same for every client, so that each can see that a metadata server answers."""
    return '\n'.join(VERSIONS).encode()


def answer(path: str, guest: Guest) -> bytes | None:
    """The body for this guest at this path, None where there is nothing (404)."""
    # Empty steps are dropped: a trailing slash means nothing, and the clients of 2019 ask for `public-keys//0`.
    match [step for step in path.split('/') if step]:
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
    """The files of this guest's NoCloud disk, {name: content}, without those that would be empty.

    With `phones_home` the vendor-data has the guest say when cloud-init is through; a metadata server must hear that.
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
        'public-keys': [key for _, key in guest.public_keys or ()],
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


def word(body: bytes) -> bytes:
    """What a form that a guest posted says: JSON {"version": 1, "host_keys": [text], "stage", "error": text or null}.

    ecompute believes none of it unseen. ValueError for more than FIELDS.
    """
    said = dict(parse_qsl(body.decode('ascii', 'replace'), errors='replace', max_num_fields=FIELDS))
    keys = [said[name] for name in HOST_KEYS if name in said]
    failed = {name: said.get(name) for name in ('stage', 'error')}
    return json.dumps({'version': 1, 'host_keys': keys, **failed}).encode()


def _vendor_data(instance: str) -> bytes:
    here = 'http://169.254.169.254'
    said = {'INSTANCE': instance, 'URL': f'{here}{phone_home(instance)}', 'SEED': f'{here}/seed/{instance}/'}
    report = REPORT
    for word, value in said.items():
        report = report.replace(word, value)
    return report.encode()


def _look_up(tree: Tree, steps: list[str]) -> bytes | None:
    """The body at these steps of the tree, None if there is none.

    A directory's body lists whole names; a step has a name's part before a `/` or `=`.
    """
    node: bytes | Tree = tree
    for step in steps:
        if isinstance(node, bytes):
            return None
        asked = {name.split('=')[0].rstrip('/'): name for name in node}
        if step not in asked:
            return None
        node = node[asked[step]]
    return node if isinstance(node, bytes) else '\n'.join(node).encode()
