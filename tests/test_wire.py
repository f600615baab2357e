"""The HTTP client: reuse, errors, deadlines."""

import asyncio
import socket
import threading

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from glm5.errors import ServiceError
from glm5.wire import HttpClient, HttpStatusError
from tests.env.scripted_model import served


async def echo(request):
    return JSONResponse(
        {
            "peer": request.client.port,
            "body": await request.json(),
            "key": request.headers.get("authorization"),
            "query": dict(request.query_params),
        }
    )


async def refuse(request):
    return JSONResponse({"error": {"message": "no", "code": "because"}}, 422)


async def slow(request):
    await asyncio.sleep(5)
    return Response()


async def chunks(request):
    async def parts():
        for piece in (b'{"a"', b": [1,", b"2]}"):
            yield piece

    return StreamingResponse(parts())


APP = Starlette(
    routes=[
        Route("/echo", echo, methods=["POST"]),
        Route("/refuse", refuse, methods=["POST"]),
        Route("/slow", slow),
        Route("/chunks", chunks),
        Route("/text", lambda request: PlainTextResponse("hello")),
        Route("/big", lambda request: JSONResponse("x" * 300_000)),
        Route("/closing", lambda request: JSONResponse(1, headers={"connection": "close"})),
    ]
)


def with_client(body):
    async def run(url):
        http = HttpClient()
        try:
            return await body(http, url)
        finally:
            http.close()

    with served(APP) as url:
        return asyncio.run(run(url))


def test_one_connection_serves_many_requests_and_parallel_ones_get_their_own():
    async def body(http, url):
        first = [(await http.post(f"{url}/echo", {"n": n}, 5))["peer"] for n in range(5)]
        parallel = await asyncio.gather(*(http.post(f"{url}/echo", {"n": n}, 5) for n in range(8)))
        return first, parallel

    first, parallel = with_client(body)
    assert len(set(first)) == 1
    assert [answer["body"]["n"] for answer in parallel] == list(range(8))
    assert len({answer["peer"] for answer in parallel}) > 1


def test_keys_queries_chunks_and_large_answers_arrive():
    async def body(http, url):
        answer = await http.post(f"{url}/echo?a=b%20c", {"text": "é"}, 5, key="k")
        assert answer["key"] == "Bearer k" and answer["query"] == {"a": "b c"} and answer["body"] == {"text": "é"}
        assert await http.get(f"{url}/chunks", 5) == {"a": [1, 2]}
        assert len(await http.get(f"{url}/big", 5)) == 300_000
        assert [await http.get(f"{url}/closing", 5) for _ in range(3)] == [1, 1, 1]

    with_client(body)


def test_failures_have_their_class_and_one_line():
    async def body(http, url):
        with pytest.raises(HttpStatusError, match="HTTP 422: no") as refused:
            await http.post(f"{url}/refuse", {}, 5)
        assert (refused.value.status, refused.value.code) == (422, "because")
        with pytest.raises(ServiceError, match=r"no answer within 0.2 s"):
            await http.get(f"{url}/slow", 0.2)
        with pytest.raises(ServiceError, match="expected a JSON answer, got b'hello'"):
            await http.get(f"{url}/text", 5)
        with pytest.raises(HttpStatusError, match="HTTP 404"):
            await http.get(f"{url}/nothing", 5)
        assert (await http.post(f"{url}/echo", {"n": 1}, 5))["body"] == {"n": 1}

    with_client(body)


def test_a_closed_port_and_a_server_that_hangs_up_are_service_errors():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]

        def hang_up():
            listener.accept()[0].close()
            with listener.accept()[0] as connection:
                connection.recv(100)
                connection.sendall(b"nonsense\r\n\r\n")

        thread = threading.Thread(target=hang_up)
        thread.start()

        async def body():
            http = HttpClient()
            with pytest.raises(ServiceError):
                await http.get(f"http://127.0.0.1:{port}/", 5)
            with pytest.raises(ServiceError, match="not an HTTP answer"):
                await http.get(f"http://127.0.0.1:{port}/", 5)
            http.close()

        asyncio.run(body())
        thread.join()

    async def refused():
        with pytest.raises(ServiceError, match=f"127.0.0.1:{port}"):
            await HttpClient().get(f"http://127.0.0.1:{port}/", 5)

    asyncio.run(refused())


def test_a_connection_in_use_when_the_client_closes_is_not_kept():
    async def body(http, url):
        asking = asyncio.create_task(http.post(f"{url}/echo", {"n": 1}, 5))
        await asyncio.sleep(0)
        http.close()
        assert (await asking)["body"] == {"n": 1}
        assert not any(http._idle.values())

    with_client(body)
