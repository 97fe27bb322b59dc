"""The server behind `qdt serve`: one page, and one request, which plays a behaviour.

It is made for one person at one machine, and for a browser in which other pages are open too. A page of
another origin cannot make it work, because the Host and the Origin of every request are checked; what is
asked for is checked before anything is played; and nothing is served but the page itself.

Requests come in threads of their own, but only one thread plays, the `Worker`: what belongs to JAX is
touched by nobody else. In front of it is a queue with a limit, and who finds it full is told so.

Imports of the project only how errors are told: the page is text, and who plays is a function.
"""

import json
import queue
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

from flask import Flask, Response, request
from werkzeug.exceptions import HTTPException
from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server

from machinery.files import UserError

WAITING = 8  # requests in the queue, at most
MAX_BODY = 4096  # bytes; a request takes a hundred to a thousand
IDLE_SECONDS = 30.0  # after which a connection that says nothing is closed
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True)
class Wish:
    """What a page asks for: who plays towards which target, from which starts.

    Of several targets each is for a part of the episode, and the last one for the rest of it.
    """

    targets: tuple[tuple[float, ...], ...]
    players: tuple[str, ...]
    seed: int
    noise: bool


@dataclass(frozen=True)
class Space:
    """What can be asked for."""

    low: Sequence[float]
    high: Sequence[float]
    players: Sequence[str]
    parts: int  # targets at most


class Refused(Exception):
    """A request that is answered with a status and a sentence."""

    def __init__(self, status: int, sentence: str):
        super().__init__(sentence)
        self.status = status


# --- what is asked for ------------------------------------------------------------------------------


def parse_wish(body: bytes, space: Space) -> Wish:
    """The wish in the body of a request; a `Refused` that says what is wrong with it."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        raise Refused(400, "The request is not JSON.") from None
    fields = {"targets", "players", "seed", "noise"}
    if not isinstance(content, dict) or content.keys() != fields:
        raise Refused(400, f"A request has the fields {', '.join(sorted(fields))}.")
    players, seed, noise = content["players"], content["seed"], content["noise"]
    known = isinstance(players, list) and all(name in space.players for name in players)
    if not known or not 1 <= len(players) == len(set(players)):
        raise Refused(400, f"Who plays is a list of some of {', '.join(space.players)}.")
    if type(seed) is not int or not 0 <= seed < 2**31:
        raise Refused(400, "The seed is a whole number from 0 to 2147483647.")
    if not isinstance(noise, bool):
        raise Refused(400, "Noise is true or false.")
    targets = content["targets"]
    if not isinstance(targets, list) or not 1 <= len(targets) <= space.parts:
        raise Refused(400, f"The targets are a list of 1 to {space.parts}.")
    return Wish(tuple(parse_target(t, space) for t in targets), tuple(players), seed, noise)


def parse_target(target: Any, space: Space) -> tuple[float, ...]:
    size = len(space.low)
    if not isinstance(target, list) or len(target) != size:
        raise Refused(400, f"A target is a list of {size} numbers.")
    for value, low, high in zip(target, space.low, space.high, strict=True):
        if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
            raise Refused(400, "Every number of a target is finite.")
        if not low <= value <= high:
            raise Refused(
                400, f"{value:g} lies outside the space, which goes from {low:g} to {high:g}."
            )
    return tuple(map(float, target))


# --- who plays --------------------------------------------------------------------------------------


class Worker:
    """The only thread that plays. It takes one job after the other, in the order in which they came."""

    def __init__(self, waiting: int = WAITING):
        self._jobs: queue.Queue[tuple[Future, Callable[[], Any]] | None] = queue.Queue(waiting)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="worker", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def submit(self, job: Callable[[], Any]) -> Future:
        """Raises `Refused` if too many are waiting already."""
        if self._ended.is_set():
            raise Refused(503, "The server is about to end.")
        future: Future = Future()
        try:
            self._jobs.put_nowait((future, job))
        except queue.Full:
            waiting = self._jobs.maxsize
            raise Refused(
                503, f"{waiting} behaviours are waiting to be played; ask again in a moment."
            ) from None
        return future

    def end(self) -> None:
        """Finishes what is being played; who still waits is told that nothing comes any more."""
        self._ended.set()
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                break
            if job is not None:
                job[0].set_exception(Refused(503, "The server is about to end."))
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            future, job = item
            try:
                future.set_result(job())
            except Exception as error:
                future.set_exception(error)


# --- what is answered -------------------------------------------------------------------------------


def make_app(
    page: str,
    policy: str,
    space: Space,
    play: Callable[[Wish], Mapping[str, Any]],
    worker: Worker,
    is_own: Callable[[str], bool],
) -> Flask:
    """The page at `/` under its security policy, and `POST /play`, for which `play` works in the worker.

    `is_own` says whether a Host is one of this server's names.
    """
    app = Flask("qdt", static_folder=None)
    app.url_map.merge_slashes = False  # no redirections
    app.config["MAX_CONTENT_LENGTH"] = MAX_BODY

    @app.before_request
    def refuse_strangers() -> None:
        if not is_own(request.headers.get("Host", "")):
            raise Refused(403, "This server does not answer under that name.")
        origin = request.headers.get("Origin")
        if origin is not None and origin != f"http://{request.headers['Host']}":
            raise Refused(403, "Only the server's own page may ask.")

    @app.after_request
    def add_headers(response: Response) -> Response:
        response.headers.update(HEADERS)
        response.headers["Content-Security-Policy"] = f"{policy}; frame-ancestors 'none'"
        return response

    @app.get("/", provide_automatic_options=False)
    def show_page() -> Response:
        return Response(page, mimetype="text/html")

    @app.post("/play", provide_automatic_options=False)
    def answer_wish() -> Response:
        if (
            request.mimetype != "application/json"
        ):  # a form of another page could send anything else
            raise Refused(415, "A request is application/json.")
        wish = parse_wish(request.get_data(), space)
        played = worker.submit(lambda: json.dumps(play(wish), allow_nan=False)).result()
        return Response(played, mimetype="application/json")

    @app.errorhandler(Exception)
    def tell(error: Exception) -> Response:
        if isinstance(error, Refused):
            status, sentence = error.status, str(error)
        elif isinstance(error, UserError):  # such as an episode that diverged
            status, sentence = 422, str(error)
        elif isinstance(error, HTTPException):
            status, sentence = error.code or 500, error.description or error.name
        else:
            traceback.print_exception(error)
            status, sentence = 500, "It could not be played; the server's terminal says why."
        response = Response(sentence, status, mimetype="text/plain")
        if status == 503:
            response.headers["Retry-After"] = "1"
        return response

    return app


def own_names(host: str, port: int) -> Callable[[str], bool]:
    """Whether a Host header names this server.

    A page of somebody else's whose name was pointed at this machine (DNS rebinding) still sends that
    name. So the server answers to its own: the address it listens on and those of this machine for
    itself; if it listens on all addresses, also the machine's name and whatever is a plain address.
    """
    names = {host, "localhost", "127.0.0.1", "::1"}
    everywhere = host in ("0.0.0.0", "::")
    if everywhere:
        names.add(socket.gethostname().lower())

    def is_own(header: str) -> bool:
        name, colon, number = header.lower().rpartition(":")
        if not colon or number.endswith("]"):
            name, number = (
                header.lower(),
                "80",
            )  # browsers leave out a port that goes without saying
        name = name.removeprefix("[").removesuffix("]")
        if number != str(port):
            return False
        return name in names or (everywhere and _is_address(name))

    return is_own


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


# --- serving ----------------------------------------------------------------------------------------


class Handler(WSGIRequestHandler):
    """Says nothing on the terminal, and does not say which versions it is made of."""

    timeout = IDLE_SECONDS

    def log(self, type: str, message: str, *args: Any) -> None:
        pass

    def version_string(self) -> str:
        return "qdt"


def reserve(host: str, port: int) -> socket.socket:
    """The socket to serve on, before anything that takes time: a port in use is told at once."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        reserved = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UserError(f"cannot serve on {host}: {error.strerror or error}.") from None
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        reserved.bind(address)
    except OSError as error:
        reserved.close()
        raise UserError(
            f"cannot serve on {host}, port {port}: {(error.strerror or str(error)).lower()}; "
            "--host and --port choose another."
        ) from None
    return reserved


def make_http_server(app: Flask, reserved: socket.socket) -> BaseWSGIServer:
    """A server on a reserved socket, a thread for each connection.

    From now on it can be reached; `serve_forever` answers, until Ctrl-C, which raises nothing.
    """
    reserved.listen(128)
    host, port = reserved.getsockname()[:2]
    return make_server(host, port, app, True, request_handler=Handler, fd=reserved.fileno())
