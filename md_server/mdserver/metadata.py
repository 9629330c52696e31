"""Compute the body for a guest and a path. Pure.

EC2's tree, /2009-04-04/… and /latest/…, is for Cirros and cloud-init's Ec2 source. NoCloud's, /seed/<uuid>/…, which
make_seed() also puts on a disk, is for current cloud images. When cloud-init has finished, a script in vendor-data
posts to /phone-home/<uuid>/: a form as cloud-init's phone_home sends it, with the additional fields stage and error.
A body has no newline at its end: cloud-init takes an EC2 value with a newline for a list of values.

Sources: Amazon's "Instance metadata" user guide; cloud-init's `sources/helpers/ec2.py` (an index entry that ends in "/"
is a directory, `0=name` stands for `0/openssh-key`), `DataSourceNoCloud.py`, `util.read_seeded`, `cc_phone_home.py`,
`cc_scripts_vendor.py`, `cmd/main.py` (status.json, result.json, manual-clean); Cirros' `ds/ec2`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

from mdserver.guests import KnownGuest

EC2_VERSIONS = ('2009-04-04', 'latest')

MAX_FORM_FIELDS = 32
# The form's fields that are host keys of the types that sshd generates today. Other fields are ignored.
HOST_KEY_FIELDS = ('pub_key_ed25519', 'pub_key_ecdsa', 'pub_key_rsa')

# The vendor-data, with placeholders INSTANCE, URL (where to post) and SEED (in the SMBIOS serial if the guest uses the
# network). cloud-init runs it once, as a script; it copies itself to run at later boots. cloud-init's own phone_home
# runs before the end, ignores failures, and logs a warning for each missing type of key. A script does not conflict
# with the user's own cloud-config either.
REPORT_SCRIPT = """\
#!/bin/sh
# Reports to the host how cloud-init ended, and the keys of sshd. Waits in the background for the end of cloud-init.
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
# cloud-init runs vendor-data once, but this directory at each boot.
PER_BOOT = '/var/lib/cloud/scripts/per-boot/'
try:
    if not sys.argv[1].startswith(PER_BOOT):
        os.makedirs(PER_BOOT, exist_ok=True)
        # An incomplete copy, after a power cut, would fail at each boot, so copy to the parent directory and rename.
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
# If no metadata server answers at a boot, cloud-init assumes a new instance and makes new keys for sshd. This file
# prevents that. Only for a guest that uses the network: a copy of its disk is a new instance.
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

Tree = Mapping[str, 'bytes | Tree']


def make_version_list() -> bytes:
    # This shows every client that a metadata server answers.
    return '\n'.join(EC2_VERSIONS).encode()


def find_body(path: str, guest: KnownGuest) -> bytes | None:
    """Return the guest's data at this path, or a directory's entries, or None if it is missing."""
    # Drop empty steps: a trailing slash has no meaning, and the clients of 2019 request `public-keys//0`.
    match [step for step in path.split('/') if step]:
        case [version, *steps] if version in EC2_VERSIONS:
            return _look_up(_make_ec2_tree(guest), steps)
        # Only the guest's own seed; the existence of other uuids is not revealed.
        case ['seed', instance, *steps] if instance == guest.instance:
            return _look_up(_make_seed_files(guest, {'dsmode': 'net'}), steps)
    return None


def _make_ec2_tree(guest: KnownGuest) -> Tree:
    hostname = guest.hostname.encode()
    meta_data: dict[str, bytes | Tree] = {
        'hostname': hostname,
        'instance-id': guest.instance.encode(),
        'local-hostname': hostname,
        'local-ipv4': guest.address.encode(),
    }
    # Every listed entry must exist, or cloud-init drops all meta-data: without keys, list no `public-keys`.
    if guest.public_keys:
        pairs = enumerate(guest.public_keys)
        meta_data['public-keys/'] = {f'{n}={name}': {'openssh-key': key.encode()} for n, (name, key) in pairs}
    tree: dict[str, bytes | Tree] = {'meta-data': meta_data}
    # In EC2, 404 means no user-data; an empty body would be a script that fails.
    if guest.user_data is not None:
        tree['user-data'] = guest.user_data
    return tree


def make_seed(guest: KnownGuest, with_phone_home: bool) -> dict[str, bytes]:
    """Return {file name: content} of a NoCloud disk, whose vendor-data may phone home."""
    files = _make_seed_files(guest, {})
    if not with_phone_home:
        del files['vendor-data']
    # cloud-init accepts no disk without both of these files as a seed.
    return {name: body for name, body in files.items() if body or name in ('meta-data', 'user-data')}


def _make_seed_files(guest: KnownGuest, extra: Mapping[str, str]) -> dict[str, bytes]:
    # cloud-init 22.4 drops a seed found by SMBIOS as "local" unless its meta-data has `dsmode: net`. A seed on a disk
    # must be read before the network is up, so it omits that.
    keys = [key for _, key in guest.public_keys or ()]
    meta_data = {'instance-id': guest.instance, 'local-hostname': guest.hostname, 'public-keys': keys, **extra}
    return {
        'meta-data': _dump_yaml(meta_data),
        'user-data': guest.user_data or b'',
        'vendor-data': _make_vendor_data(guest.instance),
        # Empty means none. After a 404, cloud-init 24.3 and newer would retry ten times, a second apart.
        'network-config': _dump_yaml(guest.network_config) if guest.network_config else b'',
    }


def _dump_yaml(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data, ensure_ascii=False, indent=1).encode()


def parse_report(body: bytes) -> bytes:
    """Convert a guest's posted form to JSON, or raise ValueError if it has too many fields.

    The JSON is {"version": 1, "host_keys": [text], "stage", "error": text or null}. ecompute validates the content.
    """
    fields = dict(parse_qsl(body.decode('ascii', 'replace'), errors='replace', max_num_fields=MAX_FORM_FIELDS))
    keys = [fields[name] for name in HOST_KEY_FIELDS if name in fields]
    failed = {name: fields.get(name) for name in ('stage', 'error')}
    return json.dumps({'version': 1, 'host_keys': keys, **failed}).encode()


def _make_vendor_data(instance: str) -> bytes:
    home, seed = (f'http://169.254.169.254/{name}/{instance}/' for name in ('phone-home', 'seed'))
    return REPORT_SCRIPT.replace('INSTANCE', instance).replace('URL', home).replace('SEED', seed).encode()


def _look_up(tree: Tree, steps: list[str]) -> bytes | None:
    node: bytes | Tree = tree
    for step in steps:
        if isinstance(node, bytes):
            return None
        # A step matches the part of a name before `/` or `=`; the body of a directory lists full names.
        name_of = {name.split('=')[0].rstrip('/'): name for name in node}
        if step not in name_of:
            return None
        node = node[name_of[step]]
    return node if isinstance(node, bytes) else '\n'.join(node).encode()
