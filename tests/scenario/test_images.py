"""eschedule image list: which hosts have the images of schedule.yaml in their caches."""

from __future__ import annotations

import json

from jsonschema import Draft202012Validator

from docs.shapes import SHAPES
from ecomp.model import keys
from ecomp.model.image import hash_image
from tests.kit.commands import Control, write_config
from tests.kit.servers import wait_until
from tests.kit.story import SMALL_QUERY, place, wait_state

TRIXIE = 'https://images.invalid/trixie.qcow2'
PINNED = f'{TRIXIE}#sha256={"ab" * 32}'


def list_images(cluster: Control) -> dict[str, dict[str, bool | None]]:
    """Return {name: {compute: whether the image is cached}}."""
    result = cluster.eschedule('image', 'list', '-f', 'json')
    assert (result.code, result.stderr) == (0, '')
    images = json.loads(result.stdout)
    Draft202012Validator(SHAPES['image list']).validate(images)
    return {image['name']: {host['compute']: host['cached'] for host in image['hosts']} for image in images}


def test_image_list_shows_hosts_that_have_an_image(cluster: Control) -> None:
    first, second = cluster.ecompute(), cluster.ecompute()
    images = {'pinned': PINNED, 'trixie': TRIXIE}
    write_config(cluster.schedule_yaml, cluster.etcd.endpoint, cluster.placement.url, images=images)
    # An ecompute of an earlier version does not report its cache.
    older = cluster.placement.make_provider(VCPU=1)
    presence = json.dumps({'token': 'x', 'hostname': 'older', 'version': '1.1.0'})
    cluster.etcd.put(keys.compute(older), presence, cluster.etcd.grant())
    nowhere = {first.uuid: False, second.uuid: False, older: None}
    wait_until(lambda: list_images(cluster) == {'trixie': nowhere, 'pinned': nowhere}, 30, 'both report their caches')

    _, instance = place(cluster, f'{SMALL_QUERY}&in_tree={first.uuid}', 'trixie')
    wait_state(cluster, instance, 'active')
    cached = {'trixie': {**nowhere, first.uuid: True}, 'pinned': nowhere}
    wait_until(lambda: list_images(cluster) == cached, 30, 'the first one reports the image')

    shown = cluster.eschedule('image', 'list')
    assert (shown.code, shown.stderr) == (0, '')
    head, pinned, trixie = shown.stdout.splitlines()
    assert head.split() == ['NAME', 'IMAGE', 'HOSTS']
    assert trixie.split()[:2] == ['trixie', TRIXIE]
    assert first.uuid in trixie
    assert second.uuid not in trixie
    assert trixie.endswith('; unknown: older')
    assert pinned.split() == ['pinned', PINNED, 'unknown:', 'older']
    presence_value = json.loads(cluster.etcd.get(keys.compute(first.uuid)) or b'')
    assert presence_value['images'] == [hash_image(TRIXIE)]
    assert cluster.eschedule('image', 'list', '-f', 'value', '-c', 'NAME').stdout == 'pinned\ntrixie\n'
    cluster.etcd.delete(keys.compute(older))  # an audit would wait for its answer
