"""Where one of many at once is placed, who all had the same answer of placement's."""

from __future__ import annotations

import random
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest

from ecomp.errors import NoCapacity
from ecomp.model.allocation import Room
from ecomp.model.choose import FIRST, PACK, SPREAD, Candidate, Offer
from ecomp.model.order import SetOrder
from ecomp.scheduler.placing.claim import Claimer, Terms
from ecomp.scheduler.placing.place import SCARCE, Placer

SIZE, EACH = {'VCPU': 1, 'MEMORY_MB': 128, 'DISK_GB': 1}, 4


@dataclass(frozen=True)
class Willing(Claimer):
    """All that is claimed is got: there is room enough for what the tests here ask."""

    def claim_what_fits(self, wanted: Mapping[str, Candidate]) -> set[str]:
        return set(wanted)


def offer(computes: int) -> Offer:
    names = [str(uuid.UUID(int=number)) for number in range(computes)]
    rooms = {name: {each: Room(EACH * amount, 0) for each, amount in SIZE.items()} for name in names}
    return Offer([{name: SIZE} for name in names], rooms)


def placing(
    claimer: type[Claimer], look: Callable[[], Offer], wanted: SetOrder, alive: list[str],
    others: tuple[int, int] = (0, 0), seed: int = 0,
) -> Placer:  # fmt: skip
    """A placer whose claims go by `claimer`; placement is not asked. `others`: how many are ahead and behind."""
    claims = claimer(None, '', '', lambda: True)  # type: ignore[arg-type]
    return Placer(claims, look, lambda: others, alive, lambda _: True, wanted, random.Random(seed))


def placed(found: Offer, seed: int, weigh: str, ahead: int, behind: int = 0, count: int = 1) -> list[str]:
    """The computes of one request's instances."""
    wanted = SetOrder(
        str(uuid.UUID(int=seed)), query='query', image='image', weigh=weigh, count=count, minimum=count
    )
    placer = placing(Willing, lambda: found, wanted, list(found.rooms), (ahead, behind), seed)
    return [each.compute for each in placer.place(found, Terms(None, None), {}).values()]


def most(where: list[str]) -> int:
    return max(Counter(where).values())


def test_with_plenty_of_equals_those_who_do_not_know_of_each_other_hardly_meet() -> None:
    """None of them has the others' claims in its answer, and each knows of some others alone."""
    found = offer(500)
    where = [placed(found, seed, SPREAD, ahead=seed % 3, behind=1)[0] for seed in range(40)]
    assert most(where) <= 3


def test_sets_leave_whole_computes_to_those_ahead() -> None:
    found = offer(500)
    where = [each for seed in range(8) for each in placed(found, seed, SPREAD, ahead=10 * seed, behind=1, count=10)]
    assert most(where) == 1


def test_where_room_is_scarce_each_leaves_the_first_places_to_those_ahead() -> None:
    found = offer(SCARCE // EACH // 2)
    room = SCARCE // 2
    where = [placed(found, seed, SPREAD, ahead=seed, behind=1)[0] for seed in range(room)]
    assert Counter(where) == dict.fromkeys(found.rooms, EACH)  # every place once, whoever shuffles how


@pytest.mark.parametrize('weigh', [PACK, FIRST])
def test_those_who_pack_fill_the_same_computes(weigh: str) -> None:
    found = offer(200)
    where = [placed(found, seed, weigh, ahead=seed, behind=1)[0] for seed in range(3 * EACH)]
    assert Counter(where) == dict.fromkeys(list(found.rooms)[:3], EACH)


def test_alone_it_spreads_over_all() -> None:
    assert most(placed(offer(20), 1, SPREAD, ahead=0, count=20)) == 1


def test_of_a_compute_with_several_places_one_that_was_taken_leaves_the_others() -> None:
    """Its GPUs are providers below it, which others are after as well; each is lost but the last."""
    compute, gpus = str(uuid.uuid4()), [str(uuid.uuid4()) for _ in range(6)]
    left = set(gpus)

    @dataclass(frozen=True)
    class Late(Claimer):
        """Others were faster wherever there is another place left."""

        def claim_what_fits(self, wanted: Mapping[str, Candidate]) -> set[str]:
            ((instance, candidate),) = wanted.items()
            (gpu,) = candidate.allocations.keys() - {compute}
            if len(left) == 1:
                return {instance}
            left.discard(gpu)
            return set()

    def look() -> Offer:
        return Offer([{compute: SIZE, gpu: {'CUSTOM_GPU': 1}} for gpu in sorted(left)], {})

    wanted = SetOrder(str(uuid.uuid4()), query='query', image='image')
    (placed,) = placing(Late, look, wanted, [compute]).place(look(), Terms(None, None), {}).values()
    assert placed.allocations.keys() == {compute, *left}


def test_a_place_on_two_computes_is_said_to_be_one() -> None:
    """As of one that shares its disk by an aggregate with another one."""
    found = offer(2)
    one, other = found.rooms
    shared = Offer([{one: {'DISK_GB': 1}, other: {'VCPU': 1, 'MEMORY_MB': 128}}], found.rooms)
    with pytest.raises(NoCapacity, match='parts of two computes, .* take the trait MISC_SHARES_VIA_AGGREGATE off'):
        placed(shared, 1, SPREAD, ahead=0)


def test_a_claim_that_was_taken_over_never_becomes_movable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A set that starts again, or is claimed again after its group changed, may come back to the same compute."""
    monkeypatch.setattr('ecomp.scheduler.placing.claim.claim', lambda *_: None)
    found = offer(1)
    (compute,) = found.rooms
    wanted = SetOrder(str(uuid.uuid4()), query='query', image='image', count=2, minimum=2)
    claimer = Claimer(None, '', '', lambda: True)  # type: ignore[arg-type]  # placement is not asked
    placer = Placer(claimer, lambda: found, lambda: (0, 0), [compute], lambda _: True, wanted, random.Random(0))
    running, new = wanted.instances
    placer.take_over({running: Candidate(compute, {compute: SIZE}, None)})
    placer.place(found, Terms(None, None), {})
    assert claimer.movable == {new}
