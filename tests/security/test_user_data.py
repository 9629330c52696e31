"""User-data is kept in etcd, also by a compute with a role."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip('cryptography', reason="pip install '.[lab]'")
pytest.importorskip('placement', reason="pip install '.[lab]'")

from ecomp.model import keys
from ecomp.store.client import Delete
from tests.kit.servers import PlacementServer, wait_until
from tests.kit.story import REACTION_SECONDS, SMALL_QUERY
from tests.security.product import Product, start_product

USER = 'compute-hv1'


def delete_user_data(cloud: Product) -> set[str]:
    deleted = set(cloud.read_entries(keys.USER_DATA))
    cloud.operator.commit([], [*map(Delete, deleted)])
    return deleted


def test_restarted_compute_puts_user_data_again(tmp_path: Path, own_placement: PlacementServer) -> None:
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
