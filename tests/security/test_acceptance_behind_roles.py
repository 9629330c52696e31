"""With roles, an acceptance that ecomp 1.1 stored in a file is moved to etcd (rule: familiar-etcd)."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip('cryptography', reason="pip install '.[lab]'")
pytest.importorskip('placement', reason="pip install '.[lab]'")

from ecomp.model.roles import WRITE, Permission, RevokePermission
from ecomp.store.roles import Accounts
from tests.kit.secured import load_etcd_config
from tests.kit.servers import PlacementServer
from tests.kit.story import read_log
from tests.security.product import OPERATOR, start_product

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
