"""Rule 10 with roles: an acceptance that ecomp 1.1 stored in a file is moved to etcd."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip('cryptography', reason="pip install '.[lab]'")
pytest.importorskip('placement', reason="pip install '.[lab]'")

from ecomp.model.roles import WRITE, Permission, Revoke
from ecomp.store.roles import Accounts
from tests.kit.secured import etcd_of
from tests.kit.servers import PlacementServer
from tests.kit.story import log_of
from tests.security.product import OPERATOR, product

ONE = 'compute-hv1'
CURE = '`elab certs DIR --enable` has to run again'


def test_the_acceptance_of_an_older_version_is_carried_over(tmp_path: Path) -> None:
    """Etcd stores it, for computes that do not know this etcd.

    With roles made by an older version the error contains the fix.
    """
    with PlacementServer(tmp_path / 'placement') as placement, product(tmp_path, placement) as cloud:
        compute = cloud.computes[ONE]
        key, old_file = f'/accepted/{compute.uuid}', compute.directory / 'state' / 'accepted'
        with closing(Accounts(etcd_of(cloud.cloud.certs, OPERATOR))) as accounts:
            accounts.apply(Revoke(ONE, Permission(WRITE, key)))
        assert compute.stop() == 0
        old_file.write_text('7\n')
        compute.start()
        assert any(CURE in line and key in line for line in log_of(compute))
        assert old_file.exists()
        assert cloud.entries('/accepted/') == {}
        cloud.cloud.enable()
        compute.restart()
        assert cloud.entries('/accepted/')[key].value == b'7'
        assert not old_file.exists()
        assert (old_file.parent / 'first-seen').read_text() == '7\n'
