"""The judge of the storm: what it must call by which name."""

from __future__ import annotations

from storm_content import SHAPES, Chain, content, offer_of
from storm_ledger import Ledger, Left, Offer, Removal, Verdict

KEY = bytes(32)
OBJECT = (KEY, "kv")


def ledger(*events: Offer | Removal, held: int | None = None) -> Ledger:
    made = Ledger()
    for event in events:
        if isinstance(event, Offer):
            made.offers[OBJECT].append(event)
        else:
            made.removals[KEY].append(event)
    if held is not None:
        made.held[OBJECT] = held
    return made


def durable(number: int, begin: int, end: int) -> Offer:
    return Offer(number, begin, end, stored=True, durable=True)


def accepted(number: int, begin: int, end: int) -> Offer:
    return Offer(number, begin, end, stored=True)


def for_room(at: int) -> Left:
    return Left(at, "nvme", "capacity", "")


def test_what_was_durable_must_be_there() -> None:
    one = ledger(durable(7, 10, 20))
    assert one.judge(OBJECT, 7, []) is Verdict.SURVIVED
    assert one.judge(OBJECT, None, []) is Verdict.LOST
    assert one.judge(OBJECT, None, [for_room(9)]) is Verdict.LOST, "evicted before, put again"
    assert one.judge(OBJECT, None, [for_room(15)]) is Verdict.EVICTED
    assert one.judge(OBJECT, None, [Left(15, "ram", "capacity", "nvme")]) is Verdict.LOST
    assert one.judge(OBJECT, None, [Left(15, "nvme", "corrupt", "")]) is Verdict.LOST
    assert one.judge(OBJECT, 8, []) is Verdict.PHANTOM, "never offered"
    existed = Offer(7, 10, 20, existed=True, durable=True)
    assert ledger(existed).judge(OBJECT, None, []) is Verdict.LOST


def test_the_first_writer_wins_and_its_bytes_stay() -> None:
    two = ledger(durable(7, 10, 20), Offer(8, 30, 40, existed=True, durable=True))
    assert two.judge(OBJECT, 7, []) is Verdict.SURVIVED
    assert two.judge(OBJECT, 8, []) is Verdict.CORRUPT


def test_a_delete_excuses_what_it_may_have_removed_and_nothing_else() -> None:
    put = durable(7, 10, 20)
    assert ledger(put, Removal(15, 25)).judge(OBJECT, None, []) is Verdict.DELETED
    assert ledger(put, Removal(1, 9, named=True)).judge(OBJECT, None, []) is Verdict.LOST
    assert ledger(held=7).judge(OBJECT, None, []) is Verdict.LOST
    assert ledger(Removal(5, 6), held=7).judge(OBJECT, None, []) is Verdict.DELETED


def test_what_was_deleted_stays_away() -> None:
    put, delete = durable(7, 10, 20), Removal(21, 25, named=True)
    assert ledger(put, delete).judge(OBJECT, 7, []) is Verdict.PHANTOM
    assert ledger(delete, held=7).judge(OBJECT, 7, []) is Verdict.PHANTOM
    assert ledger(put, Removal(21, 25)).judge(OBJECT, 7, []) is Verdict.SURVIVED, "not answered"
    overlapping = Removal(15, 25, named=True)
    assert ledger(put, overlapping).judge(OBJECT, 7, []) is Verdict.SURVIVED
    again = ledger(put, delete, durable(8, 30, 40))
    assert again.judge(OBJECT, 8, []) is Verdict.SURVIVED
    assert again.judge(OBJECT, 7, []) is Verdict.PHANTOM
    assert again.judge(OBJECT, None, []) is Verdict.LOST


def test_what_was_only_accepted_may_go_unless_the_stop_was_clean() -> None:
    one = ledger(accepted(7, 10, 20))
    assert one.judge(OBJECT, None, []) is Verdict.ABSENT
    assert one.judge(OBJECT, 7, []) is Verdict.LUCKY
    assert one.judge(OBJECT, None, [], clean=True) is Verdict.LOST
    existed = ledger(Offer(7, 10, 20, existed=True))
    assert existed.judge(OBJECT, None, [], clean=True) is Verdict.LOST
    assert existed.judge(OBJECT, None, [for_room(5)], clean=True) is Verdict.EVICTED
    assert one.judge(OBJECT, None, [for_room(5)], clean=True) is Verdict.LOST
    left = [Left(15, "ram", "capacity", "")]
    assert one.judge(OBJECT, None, left, clean=True) is Verdict.EVICTED
    assert ledger(durable(7, 10, 20)).judge(OBJECT, None, left, clean=True) is Verdict.LOST


def test_what_was_not_offered_in_full_may_not_be_there() -> None:
    assert ledger(Offer(7, 10, 20, in_full=False)).judge(OBJECT, 7, []) is Verdict.PHANTOM
    assert ledger(Offer(7, 10, 20)).judge(OBJECT, 7, []) is Verdict.LUCKY


def test_bytes_tell_whose_they_are() -> None:
    chain = Chain("default", SHAPES[2], 1, 2, 0)
    key, nbytes = chain.keys[4], chain.nbytes(4, "v")
    data = content(key, "v", 7, nbytes)
    assert offer_of(key, "v", data) == 7
    assert offer_of(key, "k", data) is None
    assert offer_of(chain.keys[5], "v", data) is None
    for at in (0, 9, 5000, nbytes - 1):
        broken = data.copy()
        broken[at] ^= 1
        assert offer_of(key, "v", broken) is None
    torn = data.copy()
    torn[8192:16384] = content(key, "v", 8, nbytes)[8192:16384]
    assert offer_of(key, "v", torn) is None
