"""The page that a node serves, in a real browser."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from contextlib import asynccontextmanager

import aiohttp
import pytest

from p2pdrl.api.client import NodeClient
from p2pdrl.api.keyfile import write_swarm_key

from .conftest import wait_until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
EVIL = "<img src=x onerror=document.title='owned'>"


class Browser:
    """A tab of a headless Chromium, driven by its own protocol (https://chromedevtools.github.io/devtools-protocol)."""

    def __init__(self, socket):
        self._socket, self._number = socket, 0
        self.errors = []

    async def call(self, method, **parameters):
        self._number += 1
        number = self._number
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while True:
            message = await self._socket.receive_json(timeout=30)
            if message.get("method") in {"Runtime.exceptionThrown", "Log.entryAdded"}:
                self.errors.append(message)
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]

    async def run(self, script):
        """What an expression gives."""
        done = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    async def until(self, script, timeout_s=20.0):
        """Wait until an expression is true."""
        async with asyncio.timeout(timeout_s):
            while not (found := await self.run(script)):  # noqa: ASYNC110 - a page has no event for us
                await asyncio.sleep(0.1)
        return found


@asynccontextmanager
async def browsing(url, folder):
    """A tab that shows ``url``."""
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--disable-sync"]
    flags += ["--no-first-run", "--disable-background-networking", "--disable-component-update"]
    command = [CHROMIUM, *flags, f"--user-data-dir={folder}", "about:blank"]
    process = await asyncio.to_thread(subprocess.Popen, command, stderr=subprocess.DEVNULL)
    try:
        port = folder / "DevToolsActivePort"
        async with asyncio.timeout(30):
            while not port.exists() or "\n" not in port.read_text():  # noqa: ASYNC110 - nor has a file
                await asyncio.sleep(0.05)
        where = f"http://127.0.0.1:{port.read_text().split()[0]}/json"
        async with aiohttp.ClientSession() as session, session.get(where) as answer:
            tab = next(one for one in await answer.json() if one["type"] == "page")
            async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                browser = Browser(socket)
                for domain in ("Runtime", "Log", "Page"):
                    await browser.call(f"{domain}.enable")
                await browser.call("Page.navigate", url=url)
                yield browser
    finally:
        process.kill()
        process.wait()


STEPS = (
    "Number([...document.querySelectorAll('#numbers div')].find(x => x.textContent.includes('steps, swarm'))"
)
STEPS += ".querySelector('dd').textContent.replaceAll(',', ''))"
INK = """(() => {
    const c = document.getElementById("curve");
    const d = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
    let n = 0;
    for (let i = 3; i < d.length; i += 4) n += d[i] > 0;
    return n;
})()"""


@pytest.mark.skipif(CHROMIUM is None, reason="wants Chromium (apt-get install chromium)")
async def test_the_page_lives_obeys_and_shows_names_only_as_text(swarm, tmp_path):
    pace = ["--set", "node.learner.max_updates_per_s=20", "--set", "task.algorithm.unroll_steps=16"]
    node = swarm.start("page", "--config", "cartpole", "--set", f"node.name={EVIL}", *pace)
    await asyncio.to_thread(swarm.training, node)
    async with browsing(f"http://{node.api}/", tmp_path / "browser") as browser:
        await browser.until("document.getElementById('members')?.textContent.includes('<img src=x')")
        assert await browser.run("document.title") != "owned"
        assert await browser.run("document.querySelectorAll('img').length") == 0
        # live: steps and curve without a reload, events as they come
        steps = await browser.run(STEPS)
        await browser.until(f"{STEPS} > {steps}")
        assert "One node trains CartPole-v1" in await browser.run("verdict(now.status, now.peers)[1]")
        await browser.until("document.getElementById('legend').childElementCount > 0", 40)
        assert await browser.run(INK) > 1000
        await browser.until("document.getElementById('events').textContent.includes('founds a swarm')")
        # an action without the token says what it wants, with it it is done
        await browser.run("document.querySelector('[data-post*=\"pause?scope=swarm\"]').click()")
        await browser.until("document.getElementById('done').textContent.includes('token')")
        token = json.dumps((node.data / "token").read_text().strip())
        await browser.run(f"document.getElementById('token').value = {token}")
        await browser.run("document.querySelector('#login button').click()")
        await browser.run("document.querySelector('[data-post*=\"pause?scope=swarm\"]').click()")
        await browser.until("document.getElementById('verdict').textContent.includes('is paused')")
        await browser.until("document.getElementById('events').textContent.includes('paused')")
        # the curve is there again after a reload, and fits a phone, in the dark
        await browser.call(
            "Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=2, mobile=True
        )
        dark = [{"name": "prefers-color-scheme", "value": "dark"}]
        await browser.call("Emulation.setEmulatedMedia", features=dark)
        await browser.call("Page.reload")
        await browser.until("document.getElementById('legend')?.childElementCount > 0")
        assert await browser.run("document.documentElement.scrollWidth") <= 390
        assert await browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(15, 18, 22)"
        assert await browser.run("now.history.times.length") >= 1
        refused = [one for one in browser.errors if "401" not in str(one)]
        assert not refused, refused
        # and says so when the node is gone
        node.kill9()
        await browser.until("document.getElementById('message').textContent.includes('no answer')")


@pytest.mark.skipif(CHROMIUM is None, reason="wants Chromium (apt-get install chromium)")
async def test_a_keyed_nodes_page_is_empty_until_it_has_the_token_of_the_link(swarm, tmp_path):
    write_swarm_key(tmp_path / "swarm.key")
    node = swarm.start("page", "--config", "cartpole", "--swarm-key-file", str(tmp_path / "swarm.key"))
    await asyncio.to_thread(wait_until, lambda: '"kind": "training"' in node.text(), 60, "it trains")
    link = await asyncio.to_thread(NodeClient.at(node.api).page)
    shown = "[...document.querySelectorAll('section')].filter(x => x.offsetHeight).length"
    async with browsing(f"http://{node.api}/", tmp_path / "browser") as browser:
        await browser.until("document.getElementById('message')?.textContent.includes('wants its token')", 40)
        assert await browser.run(shown) == 0
        await browser.call("Page.navigate", url="about:blank")
        await browser.call("Page.navigate", url=link)
        await browser.until("document.getElementById('members')?.textContent.includes('page')")
        assert await browser.run(shown) > 3
        assert await browser.run("location.hash") == ""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="wants Chromium (apt-get install chromium)")
def test_the_page_shows_who_holds_which_stage(swarm, wait_until, tmp_path):
    a = swarm.start("a", "--config=amb_pp", "--set=node.learner.max_updates_per_s=5")
    b = swarm.start("b", "--set=node.learner.max_updates_per_s=5", peers=a)
    wait_until(lambda: {row["stage"] for row in a.peers()} == {"1/2", "2/2"}, 60, "both hold a stage")
    page = shown(b, tmp_path)
    assert 'class="staged"' in page
    for words in ('<td class="stage">1/2</td>', '<td class="stage">2/2</td>'):
        assert words in page


def shown(node, tmp_path):
    """What the page's elements are, a while after a browser opened it."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    flags += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    flags += [f"--user-data-dir={tmp_path}/browser", "--virtual-time-budget=8000", "--dump-dom"]
    done = subprocess.run(
        [CHROMIUM, *flags, f"http://{node.api}/"], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout
