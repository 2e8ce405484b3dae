"""The synchronous client: credentials, and every way an address can disappoint."""

from __future__ import annotations

import http.server
import io
import socket
import threading
from http.client import HTTPConnection
from unittest.mock import Mock

import pytest
from aiohttp.test_utils import make_mocked_request

from p2pdrl.api.auth import from_this_machine
from p2pdrl.api.client import NodeClient, parse_api, read_token
from p2pdrl.errors import DaemonUnreachableError, P2PDRLError, StorageError, UsageError
from p2pdrl.testing.fake_node import FakeNode, ServedNode
from p2pdrl.transport.protocol import Address

KEY = bytes(range(32))


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:7701", "127.0.0.1", 7701), ("gpu-3", "gpu-3", 7700), ("[::1]:80", "::1", 80),
        ("[fe80::1]", "fe80::1", 7700), ("http://localhost:7702/", "localhost", 7702),
    ],
)  # fmt: skip
def test_addresses(text, host, port):
    assert parse_api(text) == Address(host, port)


@pytest.mark.parametrize("text", [
    "", "host:port", "host:0", "host:99999", "::1", "a b:1", "https://x:1", "a..b:7700", "a" * 70,
])  # fmt: skip
def test_bad_addresses(text):
    with pytest.raises(UsageError):
        parse_api(text)


def client(address, **options):
    return NodeClient(parse_api(address), **options)


def test_reading_a_keyless_node_needs_nothing(served):
    node = client(served.address)
    assert node.status()["name"] == "node-1"
    assert [peer["name"] for peer in node.peers()] == ["node-1", "node-2"]


def test_the_token_is_found_where_a_local_node_says(served):
    client(served.address).post("/v1/pause")
    assert served.node.done == ["pause node"]


@pytest.mark.parametrize(
    ("ours", "theirs", "forwarded", "here"),
    [
        ("127.0.0.1", "127.0.0.1", False, True),
        ("10.77.0.1", "10.77.0.1", False, True),
        ("10.77.0.1", "10.77.0.2", False, False),
        ("10.77.0.1", "10.77.0.1", True, False),
    ],
)
def test_who_calls_from_this_machine(ours, theirs, forwarded, here):
    ends = {"sockname": (ours, 7700), "peername": (theirs, 40000)}
    transport = Mock()
    transport.get_extra_info.side_effect = ends.get
    headers = {"X-Forwarded-For": "1.2.3.4"} if forwarded else {}
    request = make_mocked_request("GET", "/healthz", headers=headers, transport=transport)
    assert from_this_machine(request) == here


def test_the_pages_address_has_the_token_where_browsers_send_it_nowhere(served):
    assert client(served.address).page() == f"http://{served.address}/#token={served.node.token}"


def test_credentials_are_proven_and_never_sent(served, monkeypatch):
    sent, real = [], HTTPConnection.request

    def request(connection, *args, headers, **options):
        sent.append(dict(headers))
        return real(connection, *args, headers=headers, **options)

    monkeypatch.setattr(HTTPConnection, "request", request)
    client(served.address).post("/v1/pause")
    assert any("P2PDRL-Mac" in headers for headers in sent)
    assert served.node.token not in str(sent)


def test_a_keyed_node_is_read_with_key_token_or_data_folder(tmp_path):
    node = FakeNode(swarm_key=KEY, data_dir="/nowhere")
    (tmp_path / "token").write_text(node.token)
    with ServedNode(node) as served:
        assert client(served.address, swarm_key=KEY).status()["name"] == "node-1"
        assert client(served.address, token=node.token).status()["name"] == "node-1"
        assert client(served.address, data_dir=str(tmp_path)).status()["name"] == "node-1"
        node.data_dir = str(tmp_path)
        assert client(served.address).status()["name"] == "node-1"
        node.data_dir = "/nowhere"
        for options in [{}, {"swarm_key": b"x" * 32}, {"token": "8" * 64}]:
            with pytest.raises(UsageError, match="doesn't let us in"):
                client(served.address, **options).status()


def test_nobody_without_the_key_chooses_whom_we_sign_for():
    """A stranger's server that passes another node's target on, with proofs of its own making."""
    target = f'{{"target": "{"a" * 32}.{"b" * 32}", "proofs": ["{"c" * 64}"]}}'.encode()
    asked = []

    class Stranger(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append((self.command, self.path, dict(self.headers)))
            self.send_response(200)
            self.send_header("Content-Length", str(len(target)))
            self.end_headers()
            self.wfile.write(target)

        do_POST = do_GET  # noqa: N815 - as the base class names it

        def log_message(self, *_args):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Stranger)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        with pytest.raises(UsageError, match="doesn't prove that it has our key"):
            client(f"127.0.0.1:{server.server_port}", swarm_key=KEY).post("/v1/pause")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert [path.partition("?")[0] for _, path, _ in asked] == ["/v1/target"]
    assert not any("P2PDRL-Mac" in headers for *_, headers in asked)


def test_a_wrong_data_folder_is_told(served, tmp_path):
    with pytest.raises(UsageError, match="no token to be read"):
        client(served.address, data_dir=str(tmp_path / "other")).post("/v1/pause")


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 64, b"G" * 64])
def test_what_is_no_token_is_none(tmp_path, content):
    (tmp_path / "token").write_bytes(content)
    assert read_token(tmp_path) is None


def test_unwell_is_still_an_answer(served):
    served.node.reasons = ["the learner is down"]
    assert client(served.address).health()["reasons"] == ["the learner is down"]


def test_nobody_there(free_address):
    with pytest.raises(DaemonUnreachableError, match="p2pdrl node"):
        client(free_address).status()


def test_a_download_arrives_whole_and_disk_errors_are_ours(served):
    out = io.BytesIO()
    assert client(served.address).download("/v1/checkpoint", out) == 3_600_000
    assert out.getvalue() == b"p2pdrl" * 600_000

    class Full(io.BytesIO):
        def write(self, _data):
            raise OSError(28, "No space left on device")

    with pytest.raises(StorageError, match="No space left"):
        client(served.address).download("/v1/checkpoint", Full())


def test_other_refusals_are_told_in_one_line(served):
    with pytest.raises(P2PDRLError, match="refuses: scope must be node or swarm"):
        client(served.address).post("/v1/pause?scope=x")


def test_what_isnt_there_on_a_node_is_told_in_its_words(served, answering):
    answer = b'HTTP/1.1 404 Not Found\r\nContent-Length: 35\r\n\r\n{"error": "there is no invite \'a\'"}'
    with pytest.raises(P2PDRLError, match="refuses: there is no invite 'a'") as raised:
        client(answering(answer)).status()
    assert raised.value.exit_code == 1
    with pytest.raises(DaemonUnreachableError, match="isn't a p2pdrl node"):
        client(served.address).get("/v1/nothing")


@pytest.fixture
def answering():
    """Serve fixed bytes to each connection, or hold it open without a word."""
    sockets = []

    def start(answer):
        listener = socket.create_server(("127.0.0.1", 0))
        sockets.append(listener)

        def serve():
            try:
                while True:
                    peer, _ = listener.accept()
                    sockets.append(peer)
                    if answer is not None:
                        peer.recv(65536)
                        peer.sendall(answer)
                        peer.shutdown(socket.SHUT_RDWR)
            except OSError:
                return

        threads.append(threading.Thread(target=serve))
        threads[-1].start()
        return "{}:{}".format(*listener.getsockname()[:2])

    threads: list[threading.Thread] = []
    yield start
    for one in sockets:
        try:
            one.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        one.close()
    for thread in threads:
        thread.join(5)


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nnope", b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
        b'HTTP/1.1 404 Not Found\r\nContent-Length: 37\r\n\r\n{"status": 404, "error": "Not Found"}',
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nnope",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + b"[" * 100_000,
        b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{", b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000,
    ],
)  # fmt: skip
def test_what_is_no_node_is_named_so(answering, answer):
    with pytest.raises(DaemonUnreachableError, match=r"isn't a p2pdrl node|no node answers"):
        client(answering(answer)).status()


def test_a_redirect_is_not_followed(answering):
    answer = b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"
    with pytest.raises(P2PDRLError, match="refuses"):
        client(answering(answer)).status()


def test_silence_ends_at_the_deadline(answering):
    with pytest.raises(DaemonUnreachableError, match="doesn't answer within"):
        client(answering(None), timeout_s=0.05).status()
