"""One model call of a session, from the request to the recorded turn.

The turn enters the tree after it is durable, in the same step of the event loop; whoever asked for it is answered
afterwards. Once recording has begun a call is not cancelled: what is on disk and what is in memory stay the same.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from glm5.dialects.protocol import ApiError
from glm5.gateway.history import extend_chain, read_message
from glm5.gateway.reply import Reply
from glm5.gateway.requests import Call, Dialect, read_again, read_call
from glm5.gateway.sessions import PendingCall, Session
from glm5.gateway.store import Store
from glm5.gateway.tree import Node
from glm5.gateway.upstream import EnginePool, Generation, with_limit
from glm5.tokenizer.bpe import Tokenizer


class Recorder:
    """Answers requests of sessions by exact ids and records what was sampled."""

    def __init__(self, tokenizer: Tokenizer, pool: EnginePool, store: Store) -> None:
        self._tokenizer, self._pool, self._store = tokenizer, pool, store

    def join(self, session: Session, digest: bytes, dialect: Dialect, data: dict[str, Any]) -> PendingCall:
        """The running call for this request, started now if there is none. The caller waits for its ``task`` and then
        calls ``leave``. Raises ApiError for a request that cannot be recorded."""
        pending = session.pending.get(digest)
        if pending is None:
            call = read_call(session, dialect, data, self._tokenizer, int(time.time()))
            task = asyncio.get_running_loop().create_task(self._answer(session, digest, call))
            pending = session.pending[digest] = PendingCall(task, call.form)
        pending.waiters += 1
        return pending

    def leave(self, session: Session, digest: bytes, call: PendingCall) -> None:
        """A waiter goes. The call is aborted when it was the last one, unless the turn is already being recorded."""
        call.waiters -= 1
        if call.waiters == 0 and not call.task.done() and not call.is_recording:
            self.abort(session, digest, call)
            session.num_aborted += 1

    def abort(self, session: Session, digest: bytes, call: PendingCall) -> None:
        """Stop a call and its request to the engine. An identical request that comes later starts a new one."""
        call.task.cancel()
        if session.pending.get(digest) is call:
            del session.pending[digest]

    async def repeat(self, session: Session, dialect: Dialect, data: dict[str, Any], node: Node) -> Reply:
        """The answer of a recorded turn once more."""
        if node.abandoned:
            await self.set_abandoned(node, False)
        form = read_again(session, dialect, data, self._tokenizer, node)
        return Reply(form, self._tokenizer, Generation(
            output_ids=node.output_ids, logprobs=node.logprobs, versions=node.versions,
            finish_reason=node.finish_reason, cached_tokens=node.cached_tokens))

    async def _answer(self, session: Session, digest: bytes, call: Call) -> Reply:
        pending = session.pending[digest]
        try:
            generation = await self._sample(session, call)
            reply = Reply(call.form, self._tokenizer, generation)
            node = _node(call, generation, reply.message, digest)
            pending.is_recording = True
            await self._store.add_turn(session.settings.session_id, node)
            session.add(node)
        finally:
            if session.pending.get(digest) is pending:
                del session.pending[digest]
        if pending.waiters == 0:  # everybody left while the turn was being written
            await self.set_abandoned(node, True)
        return reply

    async def set_abandoned(self, node: Node, abandoned: bool) -> None:
        """Note that nobody got this answer, or that somebody did after all."""
        node.abandoned = abandoned
        await self._store.set_abandoned(node.turn_id, abandoned)

    async def _sample(self, session: Session, call: Call) -> Generation:
        session_id, settings, prompt_ids = session.settings.session_id, session.settings, call.plan.prompt_ids
        max_context = await self._pool.max_context(session_id)
        room = max_context - len(prompt_ids)
        if room < 1:  # agents look for these words, OpenAI's and Anthropic's, to compact their history
            raise ApiError(
                400, f"This model's maximum context length is {max_context} tokens. However, your messages resulted in "
                     f"{len(prompt_ids)} tokens. Please reduce the length of the messages. (prompt is too long: "
                     f"{len(prompt_ids)} tokens > {max_context} maximum)", "context_length_exceeded", "messages")
        limit = session.remaining_tokens(room, call.form.request.params.max_new_tokens)
        if call.number <= len(settings.answers):
            ids = self._tokenizer.encode(settings.answers[call.number - 1])[: limit - 1]
            return await self._pool.score(session_id, prompt_ids, [*ids, self._tokenizer.special_id("<|user|>")])
        sampling = with_limit(settings.sampling, limit, self._tokenizer.stop_ids, call.number)
        return await self._pool.generate(session_id, call.plan.prompt_text(), sampling)


def _node(call: Call, generation: Generation, message: dict[str, Any], digest: bytes) -> Node:
    """The turn; ``message`` is the answer as its client will send it back."""
    plan, response = call.plan, call.response
    return Node(
        turn_id=call.turn_id, parent=plan.parent, kind=plan.kind, tail_ids=plan.tail_ids,
        output_ids=generation.output_ids, logprobs=generation.logprobs, versions=generation.versions,
        finish_reason=generation.finish_reason, chain=extend_chain(call.chain, read_message(message, "answer")),
        num_messages=call.num_messages + 1, digest=digest, role=call.role, reason=plan.reason, origin=call.origin,
        reasoning=str(message.get("reasoning_content") or "").strip(), created=call.form.request.created,
        cached_tokens=generation.cached_tokens,
        response=None if response is None else (response[0], [*response[1], message]))
