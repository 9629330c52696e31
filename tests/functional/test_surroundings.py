"""Test surroundings that must not mislead ecomp: proxies, late servers, foreign pages."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from ecomp.agent.host import metadata
from ecomp.agent.host.metadata import is_metadata
from ecomp.conf import EtcdConfig
from ecomp.model import keys
from ecomp.model.record import ACTIVE, BUILDING, ERROR, Record, from_json, to_json
from ecomp.placement.client import Placement
from ecomp.store.client import Put, Store
from tests.functional.cloud import Cloud, new
from tests.functional.toy import Toy
from tests.kit.servers import Etcd, PlacementServer
from tests.kit.store_client import read_entry


def test_a_proxy_in_the_environment_is_not_for_our_own_servers(
    etcd: Etcd, placement: PlacementServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ('http_proxy', 'HTTP_PROXY', 'https_proxy', 'grpc_proxy', 'all_proxy'):
        monkeypatch.setenv(name, 'http://127.0.0.1:9')
    monkeypatch.delenv('no_proxy', raising=False)
    with closing(Store(EtcdConfig(endpoints=(etcd.endpoint,)))) as store:
        assert store.get('/nothing') is None
    with closing(Placement(placement.url)) as client:
        assert 'resource_providers' in client.get('/resource_providers')


def test_a_metadata_server_whose_first_answer_is_late_is_no_other_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that no answer and then a valid one is not taken for a foreign server."""
    answers = iter([None, b'2009-04-04/\nlatest/\n'])
    monkeypatch.setattr(metadata, 'answer', lambda: next(answers))
    monkeypatch.setattr(metadata, 'mdserver', lambda *_: ['sh', '-c', 'cat'])  # until its pipe ends
    server = metadata.MetadataServer(tmp_path, tmp_path, 'virbr0')
    server.ensure()
    server.stop()


def test_only_a_metadata_server_counts_as_one() -> None:
    assert is_metadata(b'2009-04-04/\nlatest/\n')
    assert is_metadata(b'1.0\n2009-04-04\nlatest')
    assert not is_metadata(b'<html>It works!</html>')
    assert not is_metadata(b'')
    assert not is_metadata(None)


@pytest.mark.parametrize(('state', 'after'), [(BUILDING, ERROR), (ACTIVE, ACTIVE)])
def test_a_build_whose_request_was_deleted_says_so(one: Toy, cloud: Cloud, state: str, after: str) -> None:
    instance = new()
    key = keys.record(one.compute, instance)
    cloud.store.commit([], [Put(key, to_json(Record(instance, one.compute, state, image='http://h/i')))])
    one.instances.end_without_request(instance, None)
    entry = read_entry(cloud.store, key)
    record = from_json(entry.value)
    assert record.state == after
    if after == ERROR:
        assert record.error is not None
        assert 'its request was deleted' in record.error.reason
        assert entry.lease
