"""Two instances of one host whose MAC is the same: the first keeps what is its own, the second is refused."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from ecomp.agent.host.metadata import GuestData
from ecomp.errors import BuildFailed
from ecomp.files import write_durably
from ecomp.model.guest import Attachment, all_macs, mac_address
from ecomp.model.order import Request
from ecomp.model.record import ACTIVE
from tests.functional.cloud import Cloud
from tests.functional.guest import SAME_MAC
from tests.functional.toy import toy

pytestmark = pytest.mark.fast
FIRST, SECOND = SAME_MAC
MAC = mac_address(FIRST, 0)


def whose(directory: Path) -> dict[str, str]:
    """The instance of each file that the metadata server reads."""
    return {path.stem: json.loads(path.read_text())['instance'] for path in directory.glob('*.json')}


@pytest.mark.parametrize('kind', ['network', 'bridge'])
def test_the_second_fails_and_takes_nothing_with_it(cloud: Cloud, tmp_path: Path, kind: str) -> None:
    """On a bridge nothing is reserved: there the metadata server's file says whose the MAC is."""
    with toy(cloud, tmp_path, networks=(Attachment(kind, 'some'),)) as compute:
        for instance in SAME_MAC:
            compute.cloud.create(cloud.wanted(compute.compute, instance))
            compute.step()
        assert compute.record(FIRST).state == ACTIVE
        reserved = compute.hypervisor.reservations()
        assert {each.instance for each in reserved.values()} == ({FIRST} if kind == 'network' else set())
        assert whose(tmp_path / 'metadata') == {MAC: FIRST}
        why = compute.read_failure(SECOND)[1]
        said = f'its MAC {MAC} is that of instance {FIRST} here: ask again, a new uuid has another'
        assert (why.stage, why.reason) == ('scheduled', said)
        assert compute.hypervisor.guests().keys() == {FIRST}


def test_a_file_is_its_instance_s_alone(tmp_path: Path) -> None:
    data = GuestData(tmp_path)
    data.write(Request(FIRST, {}), [MAC])
    data.remove(SECOND, all_macs(SECOND))
    assert whose(tmp_path) == {MAC: FIRST}
    # One that is not here any more left it: it keeps nobody from anything.
    data.write(Request(SECOND, {}), [MAC], lambda: {SECOND})
    assert whose(tmp_path) == {MAC: SECOND}
    (tmp_path / f'{MAC}.json').write_text('{')
    data.write(Request(SECOND, {}), [MAC], lambda: SAME_MAC)
    data.remove(SECOND, all_macs(SECOND))
    assert whose(tmp_path) == {}


def test_nobody_waits_for_the_disk_of_another_instance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for its file to be written; who has the same MAC is refused before that is there, and does not take it."""
    data, seen, other = GuestData(tmp_path), list[str](), mac_address(SECOND, 1)

    def second() -> None:
        data.write(Request(SECOND, {}), [other], lambda: SAME_MAC)
        seen.append(whose(tmp_path)[other])
        try:
            data.write(Request(SECOND, {}), [MAC], lambda: SAME_MAC)
        except BuildFailed as error:
            seen.append(error.reason)
        data.remove(SECOND, all_macs(SECOND))
        seen.append(str(whose(tmp_path)))

    beside, began = threading.Thread(target=second, daemon=True), threading.Lock()

    def slow(path: Path, text: str) -> None:
        if began.acquire(blocking=False):
            beside.start()
            beside.join(30)
        write_durably(path, text)

    monkeypatch.setattr('ecomp.agent.host.metadata.write_durably', slow)
    data.write(Request(FIRST, {}), [MAC], lambda: SAME_MAC)
    refused = f'its MAC {MAC} is that of instance {FIRST} here: ask again, a new uuid has another'
    assert seen == [SECOND, refused, '{}']
    assert whose(tmp_path) == {MAC: FIRST}
