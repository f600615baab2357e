"""One model call of a session, from the request to the recorded turn.

The turn enters the tree after it is durable, in the same step of the event loop; whoever asked for it is answered
afterwards. Once recording has begun a call is not cancelled: what is on disk and what is in memory stay the same.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from glm5.errors import DataError
from glm5.gateway.dialect import ChatRequest, RequestError, completion, with_token_details
from glm5.gateway.history import History, extend_chain, read_history, read_message
from glm5.gateway.sessions import Node, PendingCall, Plan, Session
from glm5.gateway.store import Store
from glm5.gateway.upstream import EnginePool, Generation, with_limit
from glm5.tokenizer.bpe import Tokenizer


class Recorder:
    """Answers requests of sessions by exact ids and records what was sampled."""

    def __init__(self, tokenizer: Tokenizer, pool: EnginePool, store: Store) -> None:
        self._tokenizer, self._pool, self._store = tokenizer, pool, store

    def join(self, session: Session, digest: bytes, request: ChatRequest) -> PendingCall:
        """The running call for this body, started now if there is none. The caller waits for its ``task`` and then
        calls ``leave``."""
        call = session.pending.get(digest)
        if call is None:
            task = asyncio.get_running_loop().create_task(self._answer(session, digest, request))
            call = session.pending[digest] = PendingCall(task)
        call.waiters += 1
        return call

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

    def answer_body(self, node: Node, request: ChatRequest) -> dict[str, Any]:
        """The completion object, with ids and log-probs where the request asks for them."""
        if not (request.logprobs or request.return_token_ids):
            return node.answer
        return with_token_details(
            node.answer, node.prompt_ids() if request.return_token_ids else None, node.output_ids,
            node.logprobs if request.logprobs else None,
            [self._tokenizer.decode([index]) for index in node.output_ids] if request.logprobs else [])

    async def _answer(self, session: Session, digest: bytes, request: ChatRequest) -> Node:
        call = session.pending[digest]
        try:
            declared_tools = request.tools if session.settings.declare_tools else None
            history = read_history(request.messages, declared_tools)
            try:
                plan = session.plan(history, declared_tools, self._tokenizer)
            except DataError as error:
                raise RequestError(400, str(error), param="messages") from None
            turn_id = session.next_turn_id()
            generation = await self._sample(session, plan, request)
            node = self._node(session, turn_id, plan, generation, history, request, digest)
            call.is_recording = True
            await self._store.add_turn(session.settings.session_id, node)
            session.add(node)
        finally:
            if session.pending.get(digest) is call:
                del session.pending[digest]
        if call.waiters == 0:  # everybody left while the turn was being written
            await self.set_abandoned(node, True)
        return node

    async def set_abandoned(self, node: Node, abandoned: bool) -> None:
        """Note that nobody got this answer, or that somebody did after all."""
        node.abandoned = abandoned
        await self._store.set_abandoned(node.turn_id, abandoned)

    async def _sample(self, session: Session, plan: Plan, request: ChatRequest) -> Generation:
        session_id, settings = session.settings.session_id, session.settings
        max_context = await self._pool.max_context(session_id)
        room = max_context - len(plan.prompt_ids)
        if room < 1:
            raise RequestError(
                400, f"This model's maximum context length is {max_context} tokens. However, your messages resulted in "
                     f"{len(plan.prompt_ids)} tokens. Please reduce the length of the messages.",
                code="context_length_exceeded", param="messages")
        limit = session.remaining_tokens(room, request.max_tokens)
        sampling = with_limit(settings.sampling, limit, self._tokenizer.stop_ids, session.calls)
        return await self._pool.generate(session_id, plan.prompt_ids, sampling)

    def _node(self, session: Session, turn_id: str, plan: Plan, generation: Generation, history: History,
              request: ChatRequest, digest: bytes) -> Node:
        text = self._tokenizer.decode(generation.output_ids, skip_special=True)
        parsed = self._tokenizer.parse(text, tools=request.tools, thinking=session.settings.enable_thinking)
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning:
            message["reasoning_content"] = parsed.reasoning
        if parsed.tool_calls:
            message["content"] = parsed.content or None
            message["tool_calls"] = [
                {"id": f"call_{turn_id}_{index}", "type": "function",
                 "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}}
                for index, call in enumerate(parsed.tool_calls)]
        has_stopped = generation.finish_reason == "stop"
        finish_reason = "tool_calls" if parsed.tool_calls and has_stopped else generation.finish_reason
        answer = completion(f"chatcmpl-{turn_id}", request.model, message, finish_reason, len(plan.prompt_ids),
                            len(generation.output_ids), generation.cached_tokens)
        return Node(turn_id=turn_id, parent=plan.parent, kind=plan.kind, tail_ids=plan.tail_ids,
                    output_ids=generation.output_ids, logprobs=generation.logprobs, versions=generation.versions,
                    finish_reason=generation.finish_reason,
                    chain=extend_chain(history.chains[-1], read_message(message, "answer")),
                    num_messages=len(history.messages) + 1, digest=digest, answer=answer)
