"""The OpenAPI description of the server and its page for people, from one table of routes.

Bodies are described as far as the server checks them; further keys are ignored, as the described APIs do.
"""

from __future__ import annotations

import html
import json
import re
from typing import Any

from glm5 import __version__
from glm5.device import BACKENDS
from glm5.dialects.conversation import EFFORTS
from glm5.engine.requests import MAX_TOP_LOGPROBS
from glm5.serve.weight_group import MAX_GROUP, MAX_TIMEOUT_S

Schema = dict[str, Any]

_TEXT, _FLAG, _INTEGER = ({"type": kind} for kind in ("string", "boolean", "integer"))
_OBJECT: Schema = {"type": "object"}


def _object(required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, **({"required": list(required)} if required else {})}


def _list(items: Schema, **limits: int) -> Schema:
    return {"type": "array", "items": items, **limits}


def _words(*words: str) -> Schema:
    return {"type": "string", "enum": list(words)}


def _range(kind: str, low: float, high: float) -> Schema:
    return {"type": kind, "minimum": low, "maximum": high}


_EVENT = {**_object(("data",), data=_TEXT, event=_TEXT), "description": "One event of the stream"}
_IDS = _list({"type": "integer", "minimum": 0}, minItems=1)
_CONTENT: Schema = {"anyOf": [_TEXT, _list(_object(("type",), type=_TEXT, text=_TEXT))]}
_STOPS = _list({"type": "string", "minLength": 1}, maxItems=16)
_SAMPLING: dict[str, Schema] = {
    "temperature": {"anyOf": [{"const": 0}, _range("number", 1e-4, 1e4)]},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"anyOf": [{"const": -1}, _range("integer", 1, 2**31 - 1)]},
    "min_p": _range("number", 0, 1),
    "repetition_penalty": {"type": "number", "exclusiveMinimum": 0, "maximum": 10},
    "presence_penalty": _range("number", -2, 2),
    "frequency_penalty": _range("number", -2, 2),
    "logit_bias": {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,9}$"},
        "additionalProperties": _range("number", -100, 100),
    },
    "seed": _INTEGER,
}
_OPENAI: dict[str, Schema] = {
    "model": _TEXT,
    "stream": _FLAG,
    "stream_options": _object(include_usage=_FLAG),
    "n": _range("integer", 1, 128),
    "stop": {"anyOf": [{"type": "string", "minLength": 1}, _STOPS]},
    "session_id": _TEXT,
    "return_token_ids": _FLAG,
    **_SAMPLING,
}
_THINKING: dict[str, Schema] = {
    "thinking": _object(type=_TEXT, clear_thinking=_FLAG, budget_tokens=_INTEGER),
    "enable_thinking": _FLAG,
    "clear_thinking": _FLAG,
    "chat_template_kwargs": _object(enable_thinking=_FLAG, clear_thinking=_FLAG),
}
_FUNCTION = _object(
    ("name",), name={"type": "string", "minLength": 1}, description=_TEXT, parameters=_OBJECT, strict=_FLAG
)
_CALL = _object(("function",), id=_TEXT, function=_object(("name", "arguments"), name=_TEXT, arguments=_TEXT))
_MESSAGE = _object(
    ("role", "content"),
    role=_words("system", "developer", "user", "assistant", "tool"),
    content={"anyOf": [_CONTENT, {"type": "null"}]},
    reasoning_content=_TEXT,
    tool_calls=_list(_CALL),
    tool_call_id=_TEXT,
)
_CHAT = _object(
    ("model", "messages"),
    messages=_list(_MESSAGE, minItems=1),
    tools=_list(_object(("type", "function"), type=_words("function"), function=_FUNCTION)),
    tool_choice={
        "anyOf": [
            _words("auto", "none", "required"),
            _object(("type", "function"), type=_words("function"), function=_FUNCTION),
        ]
    },
    parallel_tool_calls=_FLAG,
    response_format=_object(
        ("type",),
        type=_words("text", "json_object", "json_schema"),
        json_schema=_object(("schema",), name=_TEXT, schema=_OBJECT),
    ),
    max_tokens={"type": "integer", "minimum": 1},
    max_completion_tokens={"type": "integer", "minimum": 1},
    logprobs=_FLAG,
    top_logprobs=_range("integer", 0, MAX_TOP_LOGPROBS),
    reasoning_effort=_words(*EFFORTS),
    **_OPENAI,
    **_THINKING,
)
_COMPLETION = _object(
    ("model", "prompt"),
    prompt={"anyOf": [_TEXT, _list(_TEXT, minItems=1), _IDS, _list(_IDS, minItems=1)]},
    max_tokens={"type": "integer", "minimum": 1},
    logprobs=_range("integer", 0, MAX_TOP_LOGPROBS),
    **_OPENAI,
)
_RESPONSE = _object(
    ("model", "input"),
    model=_TEXT,
    input={
        "anyOf": [
            _TEXT,
            _list(
                _object(
                    (),
                    type=_words("message", "reasoning", "function_call", "function_call_output"),
                    role=_TEXT,
                    content=_CONTENT,
                ),
                minItems=1,
            ),
        ]
    },
    instructions=_TEXT,
    previous_response_id=_TEXT,
    store=_FLAG,
    stream=_FLAG,
    max_output_tokens={"type": "integer", "minimum": 1},
    tools=_list(
        {
            **_FUNCTION,
            "required": ["type", "name"],
            "properties": {**_FUNCTION["properties"], "type": _words("function")},
        }
    ),
    tool_choice={
        "anyOf": [_words("auto", "none", "required"), _object(("type", "name"), type=_words("function"), name=_TEXT)]
    },
    parallel_tool_calls=_FLAG,
    reasoning=_object(effort=_words(*EFFORTS)),
    text=_object(format=_object(("type",), type=_words("text", "json_object", "json_schema"), schema=_OBJECT)),
    metadata=_OBJECT,
    **_SAMPLING,
    **_THINKING,
)
_PROMPT: dict[str, Schema] = {
    "model": _TEXT,
    "messages": _list(_object(("role", "content"), role=_words("user", "assistant"), content=_CONTENT), minItems=1),
    "system": _CONTENT,
    "tools": _list(
        _object(
            ("name", "input_schema"),
            name={"type": "string", "minLength": 1},
            description=_TEXT,
            input_schema=_OBJECT,
            strict=_FLAG,
        )
    ),
    "tool_choice": _object(
        ("type",), type=_words("auto", "any", "tool", "none"), name=_TEXT, disable_parallel_tool_use=_FLAG
    ),
    **_THINKING,
}
_MESSAGES = _object(
    ("model", "messages", "max_tokens"),
    max_tokens={"type": "integer", "minimum": 1},
    stop_sequences=_STOPS,
    stream=_FLAG,
    metadata=_object(user_id=_TEXT),
    output_config=_object(format=_object(("type", "schema"), type=_words("json_schema"), schema=_OBJECT)),
    **_PROMPT,
    **_SAMPLING,
)
_GENERATE = _object(
    ("input_ids",),
    input_ids=_IDS,
    sampling_params={
        **_object(
            max_new_tokens={"type": "integer", "minimum": 0},
            stop_token_ids=_list(_INTEGER),
            top_logprobs=_range("integer", 0, MAX_TOP_LOGPROBS),
            grammar=_TEXT,
            **_SAMPLING,
        ),
        "additionalProperties": False,
    },
    stream=_FLAG,
    return_logprob=_FLAG,
    return_prompt_logprob=_FLAG,
    session_id=_TEXT,
    priority=_INTEGER,
)
_ROUTES: tuple[tuple[str, str, str, Schema | None, tuple[str, ...]], ...] = (
    ("post", "/v1/chat/completions", "OpenAI chat completion", _CHAT, ("id", "object", "choices", "usage")),
    ("post", "/v1/completions", "OpenAI completion", _COMPLETION, ("id", "object", "choices", "usage")),
    ("post", "/v1/responses", "OpenAI response", _RESPONSE, ("id", "object", "status", "output", "usage")),
    ("get", "/v1/responses/{response_id}", "A stored response", None, ("id", "object", "status", "output", "usage")),
    ("delete", "/v1/responses/{response_id}", "Forget a stored response", None, ("id", "deleted")),
    ("post", "/v1/messages", "Anthropic message", _MESSAGES, ("id", "type", "role", "content", "usage")),
    (
        "post",
        "/v1/messages/count_tokens",
        "Length of the prompt of a message",
        _object(("model", "messages"), **_PROMPT),
        ("input_tokens",),
    ),
    ("get", "/v1/models", "The model that is served", None, ("object", "data")),
    ("get", "/v1/models/{model_id}", "One model", None, ("id", "object")),
    ("post", "/v1/embeddings", "Always refused: the model has no embedding head", _OBJECT, ()),
    ("post", "/generate", "Ids in; ids, log-probs and weight versions out", _GENERATE, ("output_ids", "finish_reason")),
    (
        "post",
        "/update_weights_from_disk",
        "Swap the weights",
        _object(("model_path", "weight_version"), model_path=_TEXT, weight_version=_INTEGER, rollback=_FLAG),
        ("success", "weight_version"),
    ),
    (
        "post",
        "/init_weights_update_group",
        "Join the trainer's process group for weights",
        _object(("master_address", "master_port", "rank_offset", "world_size"), master_address=_TEXT,
                master_port=_range("integer", 1, 2**16 - 1), rank_offset=_range("integer", 1, MAX_GROUP - 1),
                world_size=_range("integer", 2, MAX_GROUP), backend=_words(*BACKENDS),
                timeout_s=_range("number", 1e-3, MAX_TIMEOUT_S)),
        ("success",),
    ),
    (
        "post",
        "/update_weights_from_distributed",
        "Receive weights over that group and swap them in",
        _object(("names", "dtypes", "shapes", "sha256", "weight_version"), names=_list(_TEXT), dtypes=_list(_TEXT),
                shapes=_list(_list(_INTEGER)), sha256=_TEXT, weight_version=_INTEGER),
        ("success", "weight_version"),
    ),
    ("post", "/destroy_weights_update_group", "Leave that group", None, ("success",)),
    ("post", "/pause_generation", "Run no more steps", None, ("success",)),
    ("post", "/continue_generation", "Go on", None, ("success",)),
    ("get", "/health", "Whether the server answers", None, ("status",)),
    ("get", "/health_generate", "Whether the engine steps", None, ("status",)),
    ("get", "/get_model_info", "What is served", None, ("model_path", "vocab_size", "max_context")),
    ("get", "/stats", "Counters and load", None, ("running", "queued")),
    ("get", "/metrics", "Counters and load for Prometheus", None, ()),
)
_LINKS: dict[tuple[str, str], dict[str, dict[str, str]]] = {
    ("post", "/v1/responses"): {
        "get_v1_responses_response_id": {"response_id": "$response.body#/id"},
        "delete_v1_responses_response_id": {"response_id": "$response.body#/id"},
    },
    ("get", "/v1/models"): {"get_v1_models_model_id": {"model_id": "$response.body#/data/0/id"}},
}
"""Which operations take what from the answer of another."""
_ANTHROPIC_ERROR = _object(
    ("type", "error"), type=_words("error"), error=_object(("type", "message"), type=_TEXT, message=_TEXT)
)
_OPENAI_ERROR = _object(("error",), error=_object(("message", "type", "param", "code"), message=_TEXT, type=_TEXT))


def openapi(model: str) -> dict[str, Any]:
    """The OpenAPI 3.1 document of a server of ``model``."""
    paths: dict[str, dict[str, Any]] = {}
    for method, path, meaning, body, fields in _ROUTES:
        operation = _operation(path, meaning, body, fields, model)
        operation["responses"]["200"]["links"] = {
            name: {"operationId": name, "parameters": taken} for name, taken in _LINKS.get((method, path), {}).items()
        }
        paths.setdefault(path, {})[method] = {"operationId": _operation_id(method, path), **operation}
    security = {name: {"type": "http", "scheme": "bearer"} for name in ("key",)}
    return {
        "openapi": "3.1.0",
        "info": {"title": f"glm5 serving {model}", "version": __version__},
        "paths": paths,
        "components": {"securitySchemes": security},
    }


def _operation_id(method: str, path: str) -> str:
    return "_".join([method, *re.findall(r"\w+", path)])


def _operation(path: str, meaning: str, body: Schema | None, fields: tuple[str, ...], model: str) -> dict[str, Any]:
    error = _ANTHROPIC_ERROR if path.startswith("/v1/messages") else _OPENAI_ERROR
    if "weights" in path:
        error = _OBJECT
    media = "text/plain" if path == "/metrics" else "application/json"
    answers: dict[str, Any] = {
        media: {"schema": _TEXT if path == "/metrics" else _object(fields, **{name: {} for name in fields})}
    }
    if body is not None and "stream" in body.get("properties", {}):
        answers["text/event-stream"] = {"schema": _EVENT}
    operation: dict[str, Any] = {
        "summary": meaning,
        "responses": {
            "200": {"description": "The answer", "content": answers},
            "4XX": {"description": "The request cannot be served", "content": {"application/json": {"schema": error}}},
        },
    }
    if body is not None:
        if "model" in body.get("properties", {}):
            body = {**body, "properties": {**body["properties"], "model": _words(model)}}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    if names:
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": _TEXT} for name in names]
    return operation


def docs_page(document: dict[str, Any]) -> str:
    """``document`` as one HTML page that loads nothing from elsewhere."""
    sections = []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            rows = "".join(
                f"<tr><td><code>{html.escape(name)}</code></td><td><code>{html.escape(json.dumps(schema)[:300])}</code></td></tr>"
                for name, schema in content.get("schema", {}).get("properties", {}).items()
            )
            title = f"<code>{method.upper()} {html.escape(path)}</code> {html.escape(operation['summary'])}"
            sections.append(f"<details><summary>{title}</summary><table>{rows}</table></details>")
    style = "body{font:16px sans-serif;max-width:60em;margin:2em auto}td{padding:.2em .6em;vertical-align:top}"
    title = html.escape(document["info"]["title"])
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{style}</style>"
        f"<h1>{title}</h1><p>Machine-readable: <a href=openapi.json>openapi.json</a></p>{''.join(sections)}</html>"
    )
