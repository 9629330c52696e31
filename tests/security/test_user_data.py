"""What an earlier ecomp left: user-data and an acceptance are kept in etcd, also with a role that it made."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip('cryptography', reason="pip install '.[lab]'")
pytest.importorskip('placement', reason="pip install '.[lab]'")

from ecomp.model import keys
from ecomp.model.roles import WRITE, Permission, RevokePermission, make_prefix_permission
from ecomp.store.client import Delete
from ecomp.store.roles import Accounts
from tests.kit.secured import load_etcd_config
from tests.kit.servers import PlacementServer, wait_until
from tests.kit.story import REACTION_SECONDS, SMALL_QUERY, find_log_lines, read_log
from tests.security.product import OPERATOR, Product, start_product

USER = 'compute-hv1'


def delete_user_data(cloud: Product) -> set[str]:
    deleted = set(cloud.read_entries(keys.USER_DATA))
    cloud.operator.commit([], [*map(Delete, deleted)])
    return deleted


def test_restarted_compute_puts_user_data_again_or_warns_once_if_its_role_is_old(
    tmp_path: Path, own_placement: PlacementServer
) -> None:
    with start_product(tmp_path, own_placement) as cloud:
        compute = cloud.computes[USER]
        for name in ('one', 'two'):
            (tmp_path / name).write_text(f'#!/bin/sh\necho {name}\n')
            words = ('--count', '2', '--on', compute.uuid, '--user-data', str(tmp_path / name), '--wait')
            cloud.run_successfully(SMALL_QUERY, *words)
        before = {key: entry.value for key, entry in cloud.read_entries(keys.USER_DATA).items()}
        assert delete_user_data(cloud) == before.keys()
        compute.restart()
        wait_until(
            lambda: {key: entry.value for key, entry in cloud.read_entries(keys.USER_DATA).items()} == before,
            REACTION_SECONDS,
            'both are back',
        )
        assert find_log_lines(compute, 'does not allow') == []

        with closing(Accounts(load_etcd_config(cloud.cloud.certs, OPERATOR))) as accounts:
            accounts.apply(RevokePermission(USER, make_prefix_permission(keys.USER_DATA)))
        delete_user_data(cloud)
        compute.restart()
        wait_until(lambda: find_log_lines(compute, 'its role does not allow'), REACTION_SECONDS, 'it warns')
        # A later check follows those that were due, so both contents were tried.
        cloud.run_successfully(SMALL_QUERY, '--on', compute.uuid, '--wait')
        assert len(find_log_lines(compute, 'WARNING', keys.USER_DATA, 'elab certs DIR --enable')) == 1
        assert cloud.read_entries(keys.USER_DATA) == {}


# With roles, an acceptance that ecomp 1.1 stored in a file is moved to etcd (rule: familiar-etcd).


FIRST_USER = 'compute-hv1'
ENABLE_HINT = 'run `elab certs DIR --enable` again'


def test_acceptance_file_of_an_older_version_is_moved_to_etcd(tmp_path: Path, own_placement: PlacementServer) -> None:
    """Etcd stores it, for computes that do not know this etcd.

    With roles made by an older version the error contains the fix.
    """
    with start_product(tmp_path, own_placement) as cloud:
        compute = cloud.computes[FIRST_USER]
        key, old_file = f'/accepted/{compute.uuid}', compute.directory / 'state' / 'accepted'
        with closing(Accounts(load_etcd_config(cloud.cloud.certs, OPERATOR))) as accounts:
            accounts.apply(RevokePermission(FIRST_USER, Permission(WRITE, key)))
        assert compute.stop() == 0
        old_file.write_text('7\n')
        compute.start()
        assert any(ENABLE_HINT in line and key in line for line in read_log(compute))
        assert old_file.exists()
        assert cloud.read_entries('/accepted/') == {}
        cloud.cloud.enable()
        compute.restart()
        assert cloud.read_entries('/accepted/')[key].value == b'7'
        assert not old_file.exists()
        assert (old_file.parent / 'first-seen').read_text() == '7\n'
