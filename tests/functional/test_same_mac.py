"""Test two instances on one host with the same MAC: the second one is refused."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from ecomp.agent.host.metadata import GuestData
from ecomp.errors import BuildFailed
from ecomp.files import write_durably
from ecomp.model.guest import Attachment, list_macs, make_mac_address
from ecomp.model.order import Request
from ecomp.model.record import ACTIVE
from tests.functional.cloud import Cloud
from tests.functional.guest import SAME_MAC_INSTANCES
from tests.functional.toy import make_toy_compute

pytestmark = pytest.mark.fast
FIRST, SECOND = SAME_MAC_INSTANCES
MAC = make_mac_address(FIRST, 0)


def read_owners(directory: Path) -> dict[str, str]:
    """Return the instance of each file that the metadata server reads."""
    return {path.stem: json.loads(path.read_text())['instance'] for path in directory.glob('*.json')}


@pytest.mark.parametrize('kind', ['network', 'bridge'])
def test_second_instance_fails_and_the_first_is_kept(cloud: Cloud, tmp_path: Path, kind: str) -> None:
    """Check that on a bridge, the metadata file names the MAC's owner: there is no reservation."""
    with make_toy_compute(cloud, tmp_path, networks=(Attachment(kind, 'some'),)) as compute:
        for instance in SAME_MAC_INSTANCES:
            compute.cloud.create(cloud.make_order_on(compute.compute, instance))
            compute.step()
        assert compute.read_record(FIRST).state == ACTIVE
        reserved = compute.hypervisor.list_reservations()
        assert {reservation.instance for reservation in reserved.values()} == ({FIRST} if kind == 'network' else set())
        assert read_owners(tmp_path / 'metadata') == {MAC: FIRST}
        failure = compute.read_failure(SECOND)[1]
        reason = f'its MAC {MAC} is also that of instance {FIRST} on this host'
        reason += '. Fix: create the instance with another uuid, which gives another MAC'
        assert (failure.stage, failure.reason) == ('scheduled', reason)
        assert compute.hypervisor.list_guests().keys() == {FIRST}


def test_metadata_file_is_removed_only_for_its_instance(tmp_path: Path) -> None:
    data = GuestData(tmp_path)
    data.write(Request(FIRST, {}), [MAC])
    data.remove(SECOND, list_macs(SECOND))
    assert read_owners(tmp_path) == {MAC: FIRST}
    # A file of an instance that is no longer on this host does not block others.
    data.write(Request(SECOND, {}), [MAC], lambda: {SECOND})
    assert read_owners(tmp_path) == {MAC: SECOND}
    (tmp_path / f'{MAC}.json').write_text('{')
    data.write(Request(SECOND, {}), [MAC], lambda: SAME_MAC_INSTANCES)
    data.remove(SECOND, list_macs(SECOND))
    assert read_owners(tmp_path) == {}


def test_metadata_write_does_not_wait_for_another_instance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a slow write for one instance blocks no other instance.

    An instance with the same MAC is refused before the file exists, and does not take the MAC over.
    """
    data, results, other_mac = GuestData(tmp_path), list[str](), make_mac_address(SECOND, 1)

    def write_second() -> None:
        data.write(Request(SECOND, {}), [other_mac], lambda: SAME_MAC_INSTANCES)
        results.append(read_owners(tmp_path)[other_mac])
        try:
            data.write(Request(SECOND, {}), [MAC], lambda: SAME_MAC_INSTANCES)
        except BuildFailed as error:
            results.append(error.reason)
        data.remove(SECOND, list_macs(SECOND))
        results.append(str(read_owners(tmp_path)))

    thread, began = threading.Thread(target=write_second, daemon=True), threading.Lock()

    def write_slowly(path: Path, text: str) -> None:
        if began.acquire(blocking=False):
            thread.start()
            thread.join(30)
        write_durably(path, text)

    monkeypatch.setattr('ecomp.agent.host.metadata.write_durably', write_slowly)
    data.write(Request(FIRST, {}), [MAC], lambda: SAME_MAC_INSTANCES)
    refused = (
        f'its MAC {MAC} is also that of instance {FIRST} on this host. '
        'Fix: create the instance with another uuid, which gives another MAC'
    )
    assert results == [SECOND, refused, '{}']
    assert read_owners(tmp_path) == {MAC: FIRST}
