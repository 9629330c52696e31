"""Test surroundings that must not mislead ecomp: proxies, late servers, foreign pages."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from ecomp.agent.host import metadata
from ecomp.agent.host.metadata import is_metadata
from ecomp.conf import EtcdConfig
from ecomp.model import keys
from ecomp.model.record import Record, from_json
from ecomp.model.states import ACTIVE, BUILDING, ERROR
from ecomp.model.stored import encode
from ecomp.placement.client import Placement
from ecomp.store.client import Put, Store
from tests.functional.cloud import Cloud, make_uuid
from tests.functional.toy import ToyCompute
from tests.kit.servers import Etcd, PlacementServer
from tests.kit.store_client import read_entry


def test_proxy_in_the_environment_is_ignored(
    etcd: Etcd, placement: PlacementServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ('http_proxy', 'HTTP_PROXY', 'https_proxy', 'grpc_proxy', 'all_proxy'):
        monkeypatch.setenv(name, 'http://127.0.0.1:9')
    monkeypatch.delenv('no_proxy', raising=False)
    with closing(Store(EtcdConfig(endpoints=(etcd.endpoint,)))) as store:
        assert store.get('/nothing') is None
    with closing(Placement(placement.url)) as client:
        assert 'resource_providers' in client.get('/resource_providers')


def test_late_first_answer_of_the_metadata_server_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that no answer and then a valid one is not taken for a foreign server."""
    answers = iter([None, b'2009-04-04/\nlatest/\n'])
    monkeypatch.setattr(metadata, 'fetch_root_page', lambda: next(answers))
    monkeypatch.setattr(metadata, 'make_command', lambda *_: ['sh', '-c', 'cat'])  # until its pipe ends
    server = metadata.MetadataServer(tmp_path, tmp_path, 'virbr0')
    server.ensure()
    server.stop()


def test_only_a_metadata_server_is_recognised() -> None:
    assert is_metadata(b'2009-04-04/\nlatest/\n')
    assert is_metadata(b'1.0\n2009-04-04\nlatest')
    assert not is_metadata(b'<html>It works!</html>')
    assert not is_metadata(b'')
    assert not is_metadata(None)


@pytest.mark.parametrize(('state', 'after'), [(BUILDING, ERROR), (ACTIVE, ACTIVE)])
def test_build_without_a_request_fails_with_the_reason(
    toy_compute: ToyCompute, cloud: Cloud, state: str, after: str
) -> None:
    instance = make_uuid()
    key = keys.record(toy_compute.compute, instance)
    cloud.store.commit([], [Put(key, encode(Record(instance, toy_compute.compute, state, image='http://h/i')))])
    toy_compute.instances.end_without_request(instance, None)
    entry = read_entry(cloud.store, key)
    record = from_json(entry.value)
    assert record.state == after
    if after == ERROR:
        assert record.error is not None
        assert 'its request was deleted' in record.error.reason
        assert entry.lease
