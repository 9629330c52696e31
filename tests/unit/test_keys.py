"""The layout of etcd, and which role may write which key."""

from __future__ import annotations

import itertools
import uuid
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecomp.model import keys, roles
from ecomp.model.roles import (
    AddRole,
    AddUser,
    Change,
    Give,
    Grant,
    Grants,
    Permission,
    Revoke,
    Roles,
    Take,
    below,
    changes,
    described,
    of_compute,
    of_scheduler,
    unknown,
    wanted,
    without_role,
)

# The keys of etcd, and valid uuids.


COMPUTE = 'b8756be5-a30d-4311-920c-0ad996367a8e'
INSTANCE = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'


def test_the_keys_users_and_other_hosts_see() -> None:
    assert keys.request(COMPUTE, INSTANCE) == f'/hosts/{COMPUTE}/{INSTANCE}'
    assert keys.attempt(INSTANCE) == f'/requests/{INSTANCE}'
    assert keys.booted(INSTANCE) == f'/booted/{INSTANCE}'
    assert keys.record(COMPUTE, INSTANCE) == f'/instances/{COMPUTE}/{INSTANCE}'
    assert keys.record('', INSTANCE) == f'/instances/none/{INSTANCE}'
    assert keys.old_record(INSTANCE) == f'/instances/{INSTANCE}'
    assert keys.digest('a', COMPUTE, 3) == f'/digests/{COMPUTE}/a/3'
    assert keys.recorded(keys.record(COMPUTE, INSTANCE)) == (COMPUTE, INSTANCE)
    assert keys.recorded(keys.record('', INSTANCE)) == ('', INSTANCE)
    assert keys.recorded(keys.old_record(INSTANCE)) == (None, INSTANCE)
    assert keys.compute(COMPUTE) == f'/computes/{COMPUTE}'


def test_a_prefix_does_not_match_a_longer_name() -> None:
    assert keys.request(COMPUTE, INSTANCE).startswith(keys.request_prefix(COMPUTE))
    assert not keys.request(COMPUTE + '0', INSTANCE).startswith(keys.request_prefix(COMPUTE))


@given(st.uuids())
def test_a_key_says_what_it_is_about(instance: uuid.UUID) -> None:
    assert keys.last(keys.request(COMPUTE, str(instance))) == str(instance)
    assert keys.is_uuid(str(instance))


@pytest.mark.parametrize(
    'text',
    [
        '',
        '..',
        '../x',
        INSTANCE.upper(),
        INSTANCE[:-1],
        INSTANCE.replace('-', ''),
        f'{{{INSTANCE}}}',
        f'urn:uuid:{INSTANCE}',
        INSTANCE + '\n',
        '00000000-0000-0000-0000-000000000000',
        None,
        7,
        b'x',
        [],
    ],
)
def test_other_forms_of_a_uuid_are_none(text: Any) -> None:
    assert not keys.is_uuid(text)


@given(st.binary(min_size=16, max_size=16))
def test_a_new_uuid_is_as_python_makes_it(random: bytes) -> None:
    assert keys.new_uuid(random) == str(uuid.UUID(bytes=random, version=4))


LIKE_ONE = st.text('0123456789abcdefABCDEF-{}', min_size=30, max_size=40)


@given(LIKE_ONE | st.uuids().map(str) | st.uuids().map(lambda each: each.hex))
def test_a_uuid_is_told_as_python_tells_it(text: str) -> None:
    try:
        canonical = str(uuid.UUID(text)) == text
    except ValueError:
        canonical = False
    assert keys.is_uuid(text) is canonical


# Roles: each key is tried on each role. Changes of roles: from any state to the expected one.


OWN, OTHER, SUBJECT = (f'{digit * 8}-0000-4000-8000-000000000000' for digit in '123')

# (key, may the compute OWN write it, may a scheduler write it)
KEYS = [
    (f'/hosts/{OWN}/{SUBJECT}', True, True),
    (f'/hosts/{OTHER}/{SUBJECT}', False, True),
    (f'/hosts/{OWN}', False, True),
    (f'/hosts/{OWN}0', False, True),
    (f'/instances/{OWN}/{SUBJECT}', True, True),
    (f'/instances/{OTHER}/{SUBJECT}', False, True),
    (f'/instances/{SUBJECT}', False, True),
    (f'/digests/{OWN}/a/0', True, True),
    (f'/digests/{OTHER}/a/0', False, True),
    (f'/computes/{OWN}', True, False),
    (f'/computes/{OWN}/x', False, False),
    (f'/computes/{OWN}0', False, False),
    (f'/computes/{OTHER}', False, False),
    (f'/hostnames/{OWN}', True, True),
    (f'/hostnames/{OWN}/x', False, True),
    (f'/hostnames/{OTHER}', False, True),
    (f'/accepted/{OWN}', True, False),
    (f'/accepted/{OTHER}', False, False),
    (f'/booted/{SUBJECT}', True, True),
    (f'/queues/f/{SUBJECT}', True, True),
    (f'/queues/f/{SUBJECT}/taker', True, True),
    ('/names/web', True, True),
    ('/groups/web', True, True),
    ('/quotas/p', True, True),
    ('/released/ab/1', True, True),
    (f'/requests/{SUBJECT}', False, True),
    ('/user-data/ab', False, True),
    ('/audit/a', False, True),
    (f'/audit/a/{OWN}', False, True),
    ('/flavors/small', False, False),
    ('/cluster', False, False),
    ('/anything', False, False),
    ('/', False, False),
    ('anything', False, False),
    ('\0', False, False),
]


def allows(permissions: Grants, kind: str, key: str) -> bool:
    """Return whether etcd would allow this access.

    See https://etcd.io/docs/v3.4/learning/design-auth-v3/.
    """
    return any(
        grant.kind in (kind, roles.BOTH)
        and (grant.key == key or (grant.range_end and grant.key <= key < grant.range_end))
        for grant in permissions
    )


@pytest.mark.parametrize(('key', 'compute', 'scheduler'), KEYS)
def test_who_may_write_what(key: str, compute: bool, scheduler: bool) -> None:
    assert allows(of_compute(OWN), roles.WRITE, key) == compute
    assert allows(of_scheduler(), roles.WRITE, key) == scheduler
    for permissions in (of_compute(OWN), of_scheduler()):
        assert allows(permissions, roles.READ, key) == key.startswith('/')


def test_every_prefix_of_the_layout_is_tried() -> None:
    prefixes = [value for name, value in vars(keys).items() if name.isupper() and str(value).startswith('/')]
    assert keys.HOSTS in prefixes
    for prefix in {*prefixes} - {keys.TAKER}:
        assert any(key.startswith(prefix) for key, *_ in KEYS), prefix


def test_each_has_its_role() -> None:
    layout = wanted({'compute-a': OWN, 'compute-b': OTHER}, ['scheduler-s', 'scheduler-t'], ['operator-o'])
    assert layout.users == {
        'compute-a': {'compute-a'}, 'compute-b': {'compute-b'}, 'scheduler-s': {'scheduler'},
        'scheduler-t': {'scheduler'}, 'operator-o': {'root'}, 'root': {'root'},
    }  # fmt: skip
    assert layout.roles == {'compute-a': of_compute(OWN), 'compute-b': of_compute(OTHER), 'scheduler': of_scheduler()}


def done(found: Roles, steps: list[Change]) -> Roles:
    """Return the roles after these changes.

    An AssertionError stands for a change that etcd refuses.
    """
    users, grants = dict(found.users), dict(found.roles)
    for step in steps:
        match step:
            case AddRole(role):
                assert role not in grants
                grants[role] = frozenset()
            case AddUser(user):
                assert user not in users
                users[user] = frozenset()
            case Grant(role, permission):
                grants[role] = frozenset({old for old in grants[role] if old[1:] != permission[1:]} | {permission})
            case Revoke(role, permission):
                assert any(old[1:] == permission[1:] for old in grants[role])
                grants[role] = frozenset(old for old in grants[role] if old[1:] != permission[1:])
            case Give(user, role):
                assert role in grants or role == roles.ROOT
                users[user] |= {role}
            case Take(user, role):
                users[user] -= {role}
    return Roles(users, grants)


LAYOUTS = [
    Roles({}, {}),
    wanted({}, [], ['operator-o']),
    wanted({'compute-a': OWN}, ['scheduler-s'], ['operator-o']),
    wanted({'compute-a': OTHER}, ['scheduler-s'], ['operator-o']),
    # Older layouts: the same keys with another kind of access, an obsolete prefix, a superfluous role.
    Roles(
        {'compute-a': frozenset({'root', 'compute-a'}), 'root': frozenset()},
        {'compute-a': frozenset({below('/', roles.BOTH), Permission(roles.WRITE, f'/hosts/{OWN}/', '\0')})},
    ),
    Roles({}, {'compute-a': frozenset({below('/', roles.BOTH), below(f'/hosts/{OWN}/', roles.READ)})}),
]


@pytest.mark.parametrize(('found', 'aim'), itertools.product(LAYOUTS, LAYOUTS[1:4]))
def test_changes_end_at_what_is_wanted_from_wherever_they_stop(found: Roles, aim: Roles) -> None:
    steps = changes(found, aim)
    for stop in range(len(steps) + 1):
        current = done(found, steps[:stop])
        # A key that is writable before and after all changes stays writable in between.
        for role in found.roles.keys() & aim.roles.keys():
            for key, _, _ in KEYS:
                if allows(found.roles[role], roles.WRITE, key) and allows(aim.roles[role], roles.WRITE, key):
                    assert allows(current.roles[role], roles.WRITE, key)
        current = done(current, changes(current, aim))
        assert {name: current.users[name] for name in aim.users} == aim.users
        assert {name: current.roles[name] for name in aim.roles} == aim.roles
        assert changes(current, aim) == []


def test_what_is_of_others_stays() -> None:
    start = Roles({'backup': frozenset({'reader'}), 'compute-gone': frozenset()}, {'reader': frozenset({below('/x/')})})
    aim = LAYOUTS[2]
    final = done(start, changes(start, aim))
    assert final.users['backup'] == {'reader'}
    assert final.roles['reader'] == {below('/x/')}
    assert unknown(final, aim) == ['compute-gone']
    assert unknown(final, wanted({}, [], [])) == ['compute-a', 'compute-gone', 'operator-o', 'scheduler-s']


def test_computes_that_no_role_is_for() -> None:
    current, aim = wanted({'compute-a': OWN, 'compute-b': SUBJECT}, [], []), wanted({'compute-a': OTHER}, [], [])
    assert without_role([OWN, OTHER, SUBJECT], current, aim) == [OWN]
    assert without_role([OTHER, SUBJECT], current, aim) == []
    assert without_role([OWN, SUBJECT], Roles({}, {}), aim) == [OWN, SUBJECT]


@pytest.mark.parametrize(
    ('change', 'words'),
    [
        (AddRole('r'), 'role r: added'),
        (AddUser('u'), 'user u: added'),
        (Give('u', 'r'), 'user u: has role r'),
        (Take('u', 'r'), 'user u: has role r no more'),
        (Grant('r', below('/hosts/')), 'role r: may write /hosts/'),
        (Grant('r', Permission(roles.WRITE, '/cluster')), 'role r: may write /cluster'),
        (Revoke('r', Permission(roles.BOTH, '/a', '/b')), 'role r: may no more readwrite /a to /b'),
    ],
)
def test_in_words(change: Change, words: str) -> None:
    assert described(change) == words
