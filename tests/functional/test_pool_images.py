"""The worker pool and images: who waits for a download, who does not, and what becomes of those that wait."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest

from ecomp.agent.instance.build import Cancelled, Destroy
from ecomp.agent.instance.pool import News
from ecomp.errors import BuildFailed
from ecomp.model.record import Progress
from tests.functional import stand_in
from tests.functional.tended import ALL, COMPUTE, Tended, job, same
from tests.kit.image_server import serving
from tests.kit.servers import environment, until

HOLDER = """
import sys, time
from pathlib import Path
from ecomp.files import InstanceLocks

with InstanceLocks(Path(sys.argv[1])).held(sys.argv[2], lambda: None):
    print('held', flush=True)
    time.sleep(60)
"""


def fetching(tended: Tended, word: str, count: int) -> list[Future[list[News]]]:
    """`count` builds of one image, of which one worker is fetching it and all others wait."""
    handed = [tended.hand_in(same(word)) for _ in range(count)]
    tended.tend_until((tended.directory / f'{word}.pid').exists, 'somebody fetches it')
    tended.tend_until(lambda: len(tended.pool._waiting) == count - 1, 'the others wait')
    return handed


def test_builds_that_wait_for_one_image_keep_no_other_build_waiting(pair: Tended) -> None:
    handed = fetching(pair, 'comes', 5)
    (pair.directory / 'comes.pid').unlink()
    # There are two workers, and another image is fetched beside it.
    assert pair.result(pair.hand_in(job('good'))) == ALL
    assert pair.result(pair.hand_in(same('good'))) == ALL
    assert not (pair.directory / 'comes.pid').exists()
    (pair.directory / 'go').touch()
    for each in handed:
        told = pair.result(each)
        assert told[0] == Progress('image', 34, 600), 'also those that wait are told how far it is'
        assert [news for news in told if not isinstance(news, Progress)] == ALL


def test_downloads_keep_no_build_of_what_is_here_waiting(pair: Tended, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that drip, and there are two workers: others take their places, and go again when the two are back."""
    monkeypatch.setattr('ecomp.agent.instance.pool.MOST_LENT', 8)
    drips = [job('comes'), job('comes')]
    handed = [pair.hand_in(each) for each in drips]
    busy = {pair.pid(each) for each in drips}
    for _ in range(3):
        work = job('good')
        assert pair.result(pair.hand_in(work)) == ALL
        assert pair.pid(work) not in busy
    assert not any(each.done() for each in handed)
    assert len(pair.pool._workers) <= 3 + len(drips)
    (pair.directory / 'go').touch()
    for each in handed:
        assert pair.result(each)[-3:] == ALL
    pair.tend_until(lambda: len(pair.pool._workers) == 3, 'there are as many as before')
    pair.tend_until(lambda: not pair.pool._dismissed, 'the others have ended')
    assert len([each for each in pair.pool._workers if each.ends_only]) == 1


def test_a_cached_image_is_built_while_servers_drip(tmp_path: Path) -> None:
    """The same with the real cache, and a server that does so."""
    tended = Tended(tmp_path, 2, stand_in.downloading)
    with serving(b'\0' * 510 + b'\x55\xaa') as web:
        cached = replace(job('good'), image=web.url + 'good')
        assert [each for each in tended.result(tended.hand_in(cached)) if isinstance(each, str)] == ALL
        drips = [replace(job('drip'), image=f'{web.url}drip?{number}') for number in range(2)]
        handed = [tended.hand_in(each) for each in drips]
        tended.tend_until(lambda: web.asked.count('drip') == 2, 'both drip')
        again = replace(job('good'), image=web.url + 'good')
        assert [each for each in tended.result(tended.hand_in(again)) if isinstance(each, str)] == ALL
        assert not any(each.done() for each in handed)
        for each in drips:
            tended.pool.cancel(each.instance)
        assert [type(tended.error(each)) for each in handed] == [Cancelled, Cancelled]
        assert tended.guests() == {cached.instance, again.instance}
        tended.close()


def test_many_builds_of_a_cached_image_ask_its_server_once(tmp_path: Path) -> None:
    """One after the other they waited for a server that takes its time, each for an answer of its own."""
    tended = Tended(tmp_path, 2, stand_in.downloading)
    with serving(b'\0' * 510 + b'\x55\xaa') as web:
        web.says = {'etag': '"1"'}
        for count in (1, 6):
            before = web.asked.count('good')
            handed = [tended.hand_in(replace(same('good'), image=web.url + 'good')) for _ in range(count)]
            until(lambda all_of_them=count: len(tended.pool._waiting) == all_of_them, 20, 'all are handed in')
            for each in handed:
                assert [news for news in tended.result(each) if isinstance(news, str)] == ALL
        assert web.asked.count('good') == before + 1
        tended.close()


def test_so_many_downloads_have_workers_and_no_more(pair: Tended, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr('ecomp.agent.instance.pool.MOST_LENT', 1)
    drips = [job('comes') for _ in range(4)]
    handed = [pair.hand_in(each) for each in drips]
    for each in drips[:3]:
        pair.pid(each)
    assert len(pair.pool._workers) == 3 + 1
    assert pair.result(pair.hand_in(Destroy(str(uuid.uuid4()), COMPUTE))) == []
    assert not (pair.directory / f'{drips[3].instance}.pid').exists()
    (pair.directory / 'go').touch()
    for each in handed:
        assert pair.result(each)[-3:] == ALL


def test_why_an_image_cannot_be_had_is_told_to_all_who_wait_for_it(pair: Tended) -> None:
    handed = fetching(pair, 'stalls', 5)
    (pair.directory / 'stalls.pid').unlink()
    (pair.directory / 'go').touch()
    for each in handed:
        error = pair.error(each)
        assert isinstance(error, BuildFailed)
        assert (error.stage, error.reason) == ('image', 'it was told to, later')
    assert not (pair.directory / 'stalls.pid').exists(), 'nobody has tried again'
    assert pair.guests() == set()


def test_a_killed_fetch_is_another_s_turn(pair: Tended) -> None:
    handed = fetching(pair, 'comes', 3)
    path = pair.directory / 'comes.pid'
    pid = int(path.read_text())
    path.unlink()
    os.kill(pid, signal.SIGKILL)
    pair.tend_until(path.exists, 'somebody else fetches it')
    (pair.directory / 'go').touch()
    outcomes = [pair.error(each) for each in handed]
    assert sorted(type(each).__name__ for each in outcomes) == ['NoneType', 'NoneType', 'WorkerDied']


def test_a_build_that_waits_for_its_image_is_cancelled_at_once(pair: Tended) -> None:
    first, second = same('comes'), same('comes')
    handed = pair.hand_in(first)
    pair.tend_until((pair.directory / 'comes.pid').exists, 'it is fetched')
    later = pair.hand_in(second)
    pair.tend_until(lambda: len(pair.pool._waiting) == 1, 'the second waits')
    pair.pool.cancel(second.instance)
    assert isinstance(pair.error(later), Cancelled)
    (pair.directory / 'go').touch()
    assert pair.result(handed)[-3:] == ALL


def test_a_build_kept_waiting_by_another_process_keeps_nobody_from_its_image(pair: Tended) -> None:
    kept = same('good')
    with subprocess.Popen(
        [sys.executable, '-c', HOLDER, str(pair.directory), kept.instance], env=environment(), stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        waiting = pair.hand_in(kept)
        pair.tend_until(lambda: not pair.pool._waiting, 'a worker has it')
        assert pair.result(pair.hand_in(same('good'))) == ALL
        assert not waiting.done()
        holder.kill()
    assert pair.result(waiting) == ALL
