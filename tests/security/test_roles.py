"""Roles of `elab certs --enable`: each certificate can write its own keys only.

Each key of the layout is tried with each certificate. Nested transactions and endless watches bypass roles before etcd
3.5.33, 3.6.14 and 3.7.1, so they are not tried on Debian's 3.4.23: see docs/explanation/security.md.
"""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

import pytest

pytest.importorskip('cryptography', reason="pip install '.[lab]'")

from ecomp.errors import Denied
from ecomp.store.client import Delete, Put, Store, Unchanged
from tests.kit.behind_roles import USERS, EtcdWithRoles, start_etcd_with_roles
from tests.kit.roles import INSTANCE, OTHER, OWN, WRITERS_BY_KEY
from tests.kit.secured import certify
from tests.kit.servers import b64, wait_until

PERMISSION_CASES = [
    (user, key, may)
    for key, (compute, scheduler) in WRITERS_BY_KEY.items()
    for user, may in (('compute-hv1', compute), ('scheduler-shell', scheduler), ('operator-ann', True))
]


@pytest.fixture(scope='module')
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdWithRoles]:
    with start_etcd_with_roles(tmp_path_factory.mktemp('roles')) as started:
        started.enable()
        yield started


def insert_uuids(cloud: EtcdWithRoles, key: str) -> str:
    return key.replace(OWN, cloud.computes['compute-hv1']).replace(OTHER, cloud.computes['compute-hv2'])


def read_key(cloud: EtcdWithRoles, key: str) -> tuple[bytes, int] | None:
    entry = cloud.stores['operator-ann'].get(key)
    return (entry.value, entry.revision) if entry else None


@pytest.fixture(params=PERMISSION_CASES, ids=lambda each: f'{each[0]} {each[1]}')
def permission_case(request: pytest.FixtureRequest, cloud: EtcdWithRoles) -> Iterator[tuple[Store, str, bool]]:
    """A user's store, an existing key, and whether the user may write it."""
    user, key, may = request.param
    key = insert_uuids(cloud, key)
    operator = cloud.stores['operator-ann']
    before = operator.get(key)
    operator.commit([], [Put(key, 'before')])
    yield cloud.stores[user], key, may
    operator.commit([], [Delete(key) if before is None else Put(key, before.value.decode())])


def make_writes(store: Store, key: str, revision: int) -> dict[str, Callable[[], object]]:
    """Return all known ways to change a key, of which the last deletes it."""
    return {
        'put': lambda: store.commit([], [Put(key, 'put')]),
        'compared and put': lambda: store.commit([Unchanged(key, revision)], [Put(key, 'compared')]),
        # Refused even though the condition fails and nothing would be written.
        'compared in vain': lambda: store.commit([Unchanged(key, 1)], [Put(key, 'vain')]),
        'with another': lambda: store.commit([], [Put('/names/mine', 'x'), Put(key, 'with another')]),
        'on a lease': lambda: store.commit([], [Put(key, 'lease', store.grant(60))]),
        'deleted': lambda: store.commit([], [Delete(key)]),
    }


def test_each_key_is_writable_by_its_roles_only(cloud: EtcdWithRoles, permission_case: tuple[Store, str, bool]) -> None:
    store, key, may = permission_case
    before = read_key(cloud, key)
    assert before is not None
    for way in make_writes(store, key, 0):
        current = read_key(cloud, key)
        assert current is not None
        write = make_writes(store, key, current[1])[way]
        if may:
            write()
            continue
        with pytest.raises(Denied, match='elab certs DIR --enable') as caught:
            write()
        assert '\n' not in str(caught.value)
        assert key in str(caught.value)
        assert read_key(cloud, key) == before, way
    assert (read_key(cloud, key) is None) == may


@pytest.mark.parametrize('user', USERS)
def test_every_role_reads_all_keys(cloud: EtcdWithRoles, user: str) -> None:
    operator = cloud.stores['operator-ann']
    keys = [insert_uuids(cloud, key) for key in WRITERS_BY_KEY if key != '/cluster']
    operator.commit([], [Put(key, 'x') for key in keys])
    store = cloud.stores[user]
    assert {*keys, '/cluster'} <= store.snapshot('/').entries.keys()
    assert all(store.get(key) for key in keys)
    operator.commit([], [Delete(key) for key in keys])


def test_compute_cannot_write_ranges_outside_its_role(cloud: EtcdWithRoles) -> None:
    """With etcdctl, which can do more than our client."""
    own, other = (cloud.computes[f'compute-hv{number}'] for number in (1, 2))
    operator = cloud.stores['operator-ann']
    theirs = f'/hosts/{other}/{INSTANCE}'
    operator.commit([], [Put(theirs, 'theirs'), Put(f'/hosts/{own}/{INSTANCE}', 'own')])
    before = operator.snapshot('/').entries

    def assert_refused(*words: str) -> None:
        code, output = cloud.etcdctl('compute-hv1', *words)
        assert (code != 0, 'permission denied' in output) == (True, True), (words, output)
        assert operator.snapshot('/').entries == before, words

    assert_refused('put', theirs, 'mine')
    assert_refused('del', theirs)
    assert_refused('del', '--prefix', '/hosts/')
    assert_refused('del', '--from-key', f'/hosts/{own}/')
    assert_refused('del', f'/hosts/{own}/', f'/hosts/{own}1')
    assert_refused('del', '--prefix', f'/hosts/{own}')
    assert_refused('put', f'/hosts/{own}', 'x')
    assert_refused('put', f'/hosts/{own}0', 'x')
    assert_refused('put', f'/computes/{own}0', 'x')
    assert_refused('put', f'/HOSTS/{own}/x', 'x')
    # It cannot change its own rights either.
    assert_refused('role', 'grant-permission', 'compute-hv1', 'write', '/hosts/', '/hosts0')
    assert_refused('user', 'grant-role', 'compute-hv1', 'root')
    assert_refused('user', 'add', 'compute-hv9:x')
    assert_refused('user', 'delete', 'operator-ann')
    assert_refused('user', 'passwd', 'root', '--interactive=false')
    assert_refused('auth', 'disable')
    code, output = cloud.etcdctl('compute-hv1', 'del', '--prefix', f'/hosts/{own}/')
    assert (code, output.strip()) == (0, '1')
    assert operator.get(theirs) is not None
    operator.commit([], [Delete(theirs)])


def test_compute_cannot_revoke_the_presence_of_another(cloud: EtcdWithRoles) -> None:
    """Everyone can read the lease's id, but revoking it requires write access to its keys."""
    first, second = (cloud.stores[f'compute-hv{number}'] for number in (1, 2))
    key = f'/computes/{cloud.computes["compute-hv2"]}'
    lease = second.grant(600)
    taker_key = f'/queues/f/{INSTANCE}/taker'
    second.commit([], [Put(key, 'alive', lease)])
    second.commit([], [Put(taker_key, 'mine', lease)])
    assert second.keep_alive(lease) > 590
    presence = first.get(key)
    assert presence is not None
    assert presence.lease == lease
    assert first.keep_alive(lease) > 590  # etcd requires no rights for this
    for store in (first, cloud.stores['scheduler-shell']):
        with pytest.raises(Denied):
            store.revoke(lease)
    second.revoke(lease)
    assert second.get(key) is None
    assert second.get(taker_key) is None


def test_presence_expires_with_its_lease(cloud: EtcdWithRoles) -> None:
    store = cloud.stores['compute-hv1']
    key = f'/computes/{cloud.computes["compute-hv1"]}'
    store.commit([], [Put(key, 'alive', store.grant(1))])
    wait_until(lambda: store.get(key) is None, 10, 'its lease has ended')


def test_json_gateway_has_no_access(cloud: EtcdWithRoles) -> None:
    """The gateway uses etcd's own certificate, not the client's."""
    for user in ('operator-ann', 'compute-hv1'):
        user_certs = cloud.certs / user
        context = ssl.create_default_context(cafile=str(user_certs / 'ca.crt'))
        context.load_cert_chain(user_certs / 'client.crt', user_certs / 'client.key')
        body = json.dumps({'key': b64('/names/gateway'), 'value': b64('x')}).encode()
        call = urllib.request.Request(f'https://localhost:{cloud.etcd.port}/v3/kv/put', body)
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(call, timeout=10, context=context)
        assert caught.value.code == 400
    assert cloud.stores['operator-ann'].get('/names/gateway') is None


def test_certificate_of_an_unknown_user_has_no_access(cloud: EtcdWithRoles) -> None:
    certify(cloud.certs, cloud.etcd.port, ('stranger',))
    store = cloud.open_store('compute-stranger')
    for read in (lambda: store.get('/names/x'), lambda: store.snapshot('/'), lambda: store.count('/hosts/')):
        with pytest.raises(Denied, match='read /'):
            read()
    with pytest.raises(Denied, match='write /names/x'):
        store.commit([], [Put('/names/x', '')])
    many = [Put(f'/names/{number}', '') for number in range(5)]
    with pytest.raises(Denied, match='write /names/0, /names/1, /names/2, 2 more: '):
        store.commit([], many)
