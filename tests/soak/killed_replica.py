"""Two replicas under Ray Serve, one of them killed under load: what do clients see?

    python -m tests.soak.killed_replica --clients 8 --requests 12

Needs `pip install 'selfspec[ray]'`. Half of the requests are streamed. A request can be sent again until the first piece of
its answer is out; OpenAI's client does that by itself, twice. So no request may be lost but streams that had begun.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import openai
import psutil

from layerskip_models import DEMO_PATH
from selfspec import SelfSpecGenerator

TOKENS = 120
PROMPTS = ("def fibonacci(n):\n", "Once upon a time", "Question: Tom has 3 apples", "import os\n", "The president said")


@dataclass(slots=True)
class KilledReplicaReport:
    """What clients saw. right: answers that are the model's own text. sent_again: tries that failed and were repeated.

    broken: streams that ended after text had come, all of it right. lost: everything else.
    """

    right: int = 0
    sent_again: int = 0
    broken: int = 0
    lost: list[str] = field(default_factory=list)


@contextmanager
def two_replicas() -> Iterator[str]:
    """The address of a server with two replicas of the demo model, on this machine."""
    import ray
    from ray import serve

    from selfspec.serve.replicas import ReplicaOptions, build

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100_000_000, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(
            build(ReplicaOptions(num_replicas=2, policy="auto:cost=layers", served_name="demo")), route_prefix="/"
        )
        yield f"http://127.0.0.1:{port}/v1"
        serve.shutdown()
    finally:
        ray.shutdown()


def replica_pids() -> list[int]:
    """Of the replicas that this process has started."""
    children = psutil.Process().children(recursive=True)
    return [child.pid for child in children if child.status() != "zombie" and "ServeReplica" in child.cmdline()[0]]


async def client(number: int, requests: int, address: str, expected: dict[str, str], seen: KilledReplicaReport) -> None:
    """Send one request after the other, every second one streamed."""
    async with openai.AsyncOpenAI(base_url=address, api_key="none") as api:
        for seq_round in range(requests):
            prompt = PROMPTS[(number + seq_round) % len(PROMPTS)]
            got, streamed = "", (number + seq_round) % 2 == 0
            try:
                raw = await api.completions.with_raw_response.create(
                    model="demo", prompt=prompt, max_tokens=TOKENS, temperature=0, stream=streamed
                )
                seen.sent_again += raw.retries_taken
                answer = raw.parse()
                if isinstance(answer, openai.AsyncStream):
                    async for chunk in answer:
                        got += chunk.choices[0].text
                else:
                    got = answer.choices[0].text
            except Exception as error:
                if streamed and got and expected[prompt].startswith(got):
                    seen.broken += 1
                else:
                    seen.lost.append(f"streamed: {streamed}, {len(got)} characters had come: {error!r}")
                continue
            if got == expected[prompt]:
                seen.right += 1
            else:
                seen.lost.append(f"streamed: {streamed}, another text")


async def killed_under_load(address: str, clients: int, requests: int, expected: dict[str, str]) -> KilledReplicaReport:
    """Kill a replica when every client has had about one answer; wait until all are through and Ray has started another."""
    seen = KilledReplicaReport()
    tasks = [asyncio.create_task(client(n, requests, address, expected, seen)) for n in range(clients)]
    while seen.right < clients and not all(task.done() for task in tasks):
        await asyncio.sleep(0.01)
    os.kill(replica_pids()[0], signal.SIGKILL)
    await asyncio.gather(*tasks)
    while len(replica_pids()) < 2:
        await asyncio.sleep(0.5)
    return seen


def main() -> None:
    """Print the outcome. The exit status is 1 if a request was lost, or if the kill hit none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--requests", type=int, default=12, help="of each client")
    asked = parser.parse_args()
    demo = SelfSpecGenerator.from_pretrained(DEMO_PATH)
    expected = {p: demo.generate(p, max_new_tokens=TOKENS, do_sample=False).text or "" for p in PROMPTS}
    with two_replicas() as address:
        seen = asyncio.run(killed_under_load(address, asked.clients, asked.requests, expected))
    print(
        f"{asked.clients * asked.requests} requests: {seen.right} right, {seen.sent_again} tries repeated, "
        f"{seen.broken} streams broken off after text had come, {len(seen.lost)} lost",
        *seen.lost,
        sep="\n",
    )
    raise SystemExit(1 if seen.lost or not seen.sent_again + seen.broken else 0)


if __name__ == "__main__":
    main()
