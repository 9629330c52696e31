"""The layout of etcd, and which role may write which key."""

from __future__ import annotations

import itertools
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecomp.model import keys, roles
from ecomp.model.roles import (
    AddRole,
    AddUser,
    Change,
    GrantPermission,
    GrantRole,
    Permission,
    Permissions,
    RevokePermission,
    RevokeRole,
    Roles,
    list_compute_permissions,
    list_scheduler_permissions,
    make_prefix_permission,
    make_roles,
    plan_changes,
)
from tests.kit.roles import INSTANCE, OTHER, OWN, WRITERS_BY_KEY

COMPUTE = 'b8756be5-a30d-4311-920c-0ad996367a8e'


def test_key_of_a_record_is_parsed() -> None:
    """The layout of all keys is in tests/golden/keys.txt."""
    for compute in (COMPUTE, ''):
        assert keys.parse_record_key(keys.record(compute, INSTANCE)) == (compute, INSTANCE)
    assert keys.parse_record_key('/instances/x') == ('', 'x')


def test_prefix_of_a_compute_excludes_longer_names() -> None:
    assert keys.request(COMPUTE, INSTANCE).startswith(keys.request_prefix(COMPUTE))
    assert not keys.request(COMPUTE + '0', INSTANCE).startswith(keys.request_prefix(COMPUTE))


@given(st.uuids())
def test_last_returns_the_instance_of_a_key(instance: uuid.UUID) -> None:
    assert keys.get_last_part(keys.request(COMPUTE, str(instance))) == str(instance)
    assert keys.is_uuid(str(instance))


@given(st.binary(min_size=16, max_size=16))
def test_new_uuid_equals_python_s_uuid4(random: bytes) -> None:
    assert keys.make_uuid(random) == str(uuid.UUID(bytes=random, version=4))


UUID_LIKE_TEXTS = st.text('0123456789abcdefABCDEF-{}', min_size=30, max_size=40)


@given(UUID_LIKE_TEXTS | st.uuids().map(str) | st.uuids().map(lambda each: each.hex))
def test_is_uuid_agrees_with_python_s_canonical_form(text: str) -> None:
    try:
        canonical = str(uuid.UUID(text)) == text
    except ValueError:
        canonical = False
    assert keys.is_uuid(text) is canonical


# Roles: each key is tried on each role. Changes of roles: from any state to the expected one.


def is_allowed(permissions: Permissions, kind: str, key: str) -> bool:
    """See https://etcd.io/docs/v3.4/learning/design-auth-v3/."""
    return any(
        grant.kind in (kind, roles.READ_WRITE)
        and (grant.key == key or (grant.range_end and grant.key <= key < grant.range_end))
        for grant in permissions
    )


def test_role_allows_exactly_its_keys() -> None:
    cases = WRITERS_BY_KEY | dict.fromkeys(('/', 'anything', '\0'), (False, False))
    for key, writers in cases.items():
        for permissions, may_write in zip(
            (list_compute_permissions(OWN), list_scheduler_permissions()), writers, strict=True
        ):
            assert is_allowed(permissions, roles.WRITE, key) == may_write, key
            assert is_allowed(permissions, roles.READ, key) == key.startswith('/'), key


def test_every_prefix_of_the_layout_has_a_case() -> None:
    prefixes = [value for name, value in vars(keys).items() if name.isupper() and str(value).startswith('/')]
    assert keys.HOSTS in prefixes
    for prefix in {*prefixes} - {keys.TAKER}:
        assert any(key.startswith(prefix) for key in WRITERS_BY_KEY), prefix


def test_each_certificate_has_its_role() -> None:
    layout = make_roles({'compute-a': OWN, 'compute-b': OTHER}, ['scheduler-s', 'scheduler-t'], ['operator-o'])
    assert layout.users == {
        'compute-a': {'compute-a'}, 'compute-b': {'compute-b'}, 'scheduler-s': {'scheduler'},
        'scheduler-t': {'scheduler'}, 'operator-o': {'root'}, 'root': {'root'},
    }  # fmt: skip
    assert layout.roles == {
        'compute-a': list_compute_permissions(OWN),
        'compute-b': list_compute_permissions(OTHER),
        'scheduler': list_scheduler_permissions(),
    }


def apply_changes(current: Roles, steps: list[Change]) -> Roles:
    """Return the roles after these changes, or fail for a change that etcd refuses."""
    users, grants = dict(current.users), dict(current.roles)
    for step in steps:
        match step:
            case AddRole(role):
                assert role not in grants
                grants[role] = frozenset()
            case AddUser(user):
                assert user not in users
                users[user] = frozenset()
            case GrantPermission(role, permission):
                grants[role] = frozenset({old for old in grants[role] if old[1:] != permission[1:]} | {permission})
            case RevokePermission(role, permission):
                assert any(old[1:] == permission[1:] for old in grants[role])
                grants[role] = frozenset(old for old in grants[role] if old[1:] != permission[1:])
            case GrantRole(user, role):
                assert role in grants or role == roles.ROOT
                users[user] |= {role}
            case RevokeRole(user, role):
                users[user] -= {role}
    return Roles(users, grants)


LAYOUTS = [
    Roles({}, {}),
    make_roles({}, [], ['operator-o']),
    make_roles({'compute-a': OWN}, ['scheduler-s'], ['operator-o']),
    make_roles({'compute-a': OTHER}, ['scheduler-s'], ['operator-o']),
    # Older layouts: the same keys with another kind of access, an obsolete prefix, a superfluous role.
    Roles(
        {'compute-a': frozenset({'root', 'compute-a'}), 'root': frozenset()},
        {
            'compute-a': frozenset(
                {make_prefix_permission('/', roles.READ_WRITE), Permission(roles.WRITE, f'/hosts/{OWN}/', '\0')}
            )
        },
    ),
    Roles(
        {},
        {
            'compute-a': frozenset(
                {make_prefix_permission('/', roles.READ_WRITE), make_prefix_permission(f'/hosts/{OWN}/', roles.READ)}
            )
        },
    ),
]


@pytest.mark.parametrize(('before', 'aim'), itertools.product(LAYOUTS, LAYOUTS[1:4]))
def test_changes_resume_after_a_stop_at_any_step(before: Roles, aim: Roles) -> None:
    steps = plan_changes(before, aim)
    for stop in range(len(steps) + 1):
        current = apply_changes(before, steps[:stop])
        # A key that is writable before and after all changes stays writable in between.
        for role in before.roles.keys() & aim.roles.keys():
            for key in WRITERS_BY_KEY:
                if is_allowed(before.roles[role], roles.WRITE, key) and is_allowed(aim.roles[role], roles.WRITE, key):
                    assert is_allowed(current.roles[role], roles.WRITE, key)
        current = apply_changes(current, plan_changes(current, aim))
        assert {name: current.users[name] for name in aim.users} == aim.users
        assert {name: current.roles[name] for name in aim.roles} == aim.roles
        assert plan_changes(current, aim) == []
