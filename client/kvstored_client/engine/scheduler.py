"""Which tokens of which sequences the next step computes: continuous batching.

Sequences that decode go first, one token each. What prompts still need shares a budget, chunk by
chunk, the one served longest ago first: a very long prompt delays neither answers under way nor
short prompts beside it. When blocks run out the youngest sequence gives its back and is computed
again later. Orca: https://www.usenix.org/conference/osdi22/presentation/yu; chunked prefill:
https://arxiv.org/abs/2308.16369.
"""

from __future__ import annotations

from collections import deque
from itertools import islice

from kvstored_client.engine.admission import Admission
from kvstored_client.engine.blocks import CHUNK_TOKENS, OutOfBlocks
from kvstored_client.engine.sequence import ChunkKey, Sequence
from kvstored_client.engine.types import EngineLimits, EngineStats, Offer, Segment, StoreHook

Planned = tuple[Sequence, Segment]


class Scheduler:
    """Queues of one engine. For the engine's thread.

    `waiting` have no blocks; `running` were admitted, oldest request first, and load, prefill or
    decode.
    """

    def __init__(
        self,
        admission: Admission,
        hook: StoreHook | None,
        limits: EngineLimits,
        stats: EngineStats,
    ) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._admission = admission
        self._hook = hook
        self._limits = limits
        self._stats = stats
        self._step = 0

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that ended or was aborted; its blocks go back."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self._admission.release(sequence)

    def admit(self) -> list[Sequence]:
        """Admit who waits, as far as there is room, and go on with loads that are decided. Returns
        those whose prompts are now ready to be computed.
        """
        placed = []
        # Deferred ones are passed over, so more than one is looked at, but not the whole queue.
        for sequence in list(islice(self.waiting, self._limits.max_running)):
            if len(self.running) >= self._limits.max_running:
                break
            # Those that run may each want one more block soon.
            outcome = self._admission.begin(sequence, spare=len(self.running))
            if outcome == "no room":
                break
            if outcome == "admitted":
                self.waiting.remove(sequence)
                self.running.append(sequence)
                self.running.sort(key=lambda s: s.arrival)
                if sequence.pending is None:
                    placed.append(sequence)
        for sequence in [s for s in self.running if s.pending is not None and s.pending.ready()]:
            if self._admission.settle_load(sequence):
                placed.append(sequence)
            else:
                self._wait_again(sequence)
        return placed

    def plan(self) -> list[Planned]:
        """The segments of the next step, in the order in which they are to be computed."""
        self._step += 1
        self._make_room_for_decoding()
        decoding = [s for s in self.running if s.pending is None and s.decodes]
        planned = [(s, s.segment(s.computed)) for s in decoding]
        return planned + self._plan_prefill()

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's blocks; it waits at the head of the queue to be computed again.
        What it has computed is offered to the store, and stays in the tree while there is room.
        """
        self.offer(sequence)
        self._stats.preemptions += 1
        self._wait_again(sequence)
        sequence.may_load = True

    def preempt_all(self) -> None:
        """Take all blocks from all sequences; none of what they hold is of use any more."""
        for sequence in reversed(list(self.running)):
            self._stats.preemptions += 1
            self._wait_again(sequence)
            sequence.may_load = True

    def offer(self, sequence: Sequence) -> None:
        """Offer the store the chunks that are computed and not offered yet, or that it did not take
        when they were.
        """
        if self._hook is None:
            return
        computed = sequence.computed // CHUNK_TOKENS
        first = self._admission.first_to_offer(sequence)
        if first >= computed:
            return
        tokens, offer = sequence.tokens[: computed * CHUNK_TOKENS], Offer()
        sequence.stored = self._hook.store(sequence.request, tokens, sequence.table, first, offer)
        self._admission.mark_offered(sequence, first, offer)

    def _make_room_for_decoding(self) -> None:
        """Give each sequence that decodes the block its token goes to, oldest first. The youngest
        are preempted where there is none.
        """
        for sequence in list(self.running):
            while (
                sequence in self.running
                and sequence.pending is None
                and sequence.computed >= sequence.table.room_tokens
            ):
                try:
                    sequence.table.append(self._admission.take(1))
                except OutOfBlocks:
                    self.preempt(self.running[-1])

    def _plan_prefill(self) -> list[Planned]:
        prompts = [s for s in self.running if s.pending is None and not s.decodes]
        prompts.sort(key=lambda s: s.served_at)
        planned: list[Planned] = []
        computed_now: set[ChunkKey] = set()
        ends: dict[Sequence, int] = {}
        left = self._limits.prefill_tokens
        while prompts and left > 0:
            again = []
            for sequence in prompts:
                segment = self._next_segment(sequence, ends.get(sequence), computed_now)
                if segment is None:
                    continue
                if planned and len(segment.token_ids) > left:
                    left = 0
                    break
                left -= len(segment.token_ids)
                planned.append((sequence, segment))
                sequence.served_at = self._step
                ends[sequence] = segment.start + len(segment.token_ids)
                if not segment.wants_logits:
                    again.append(sequence)
            prompts = again
        return planned

    def _next_segment(
        self, sequence: Sequence, start: int | None, computed_now: set[ChunkKey]
    ) -> Segment | None:
        """The next piece of a prompt, from `start` on if this step computes what is before; None
        where another sequence computes the same chunk in this step, to be adopted in the next.
        """
        if start is not None:
            return sequence.segment(start)
        self._admission.adopt(sequence)
        if self._admission.own_prefixes and sequence.settled < sequence.shareable_chunks:
            key = sequence.key(sequence.settled)
            if key in computed_now:
                return None
            computed_now.add(key)
        return sequence.segment(sequence.computed)

    def _wait_again(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._admission.release(sequence)
        self.waiting.appendleft(sequence)
