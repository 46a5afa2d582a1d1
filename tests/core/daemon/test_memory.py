"""What requests cost in memory, and that nothing of them stays."""

from __future__ import annotations

import random
import time

import pytest

from tests.fakes.client import Client
from tests.fakes.daemon import Daemon
from wkvm_proto.messages import Stats


def settled(client: Client) -> Stats:
    """Stats of a core that has nothing to do."""

    def is_idle() -> bool:
        stats = client.find(Stats)
        return stats is not None and stats.core.gauges["wkvm_requests_open"] == 0.0

    client.events.clear()
    client.wait(is_idle, 60.0)
    stats = client.find(Stats)
    assert stats is not None
    return stats


def fresh_gauge(client: Client, name: str) -> float:
    client.events.clear()
    client.wait(lambda: client.find(Stats) is not None)
    return client.gauge(name)


def test_a_waiting_request_costs_less_than_10_kib_beyond_its_tokens() -> None:
    count = 3000
    with Daemon("--slots", "1", "--max-rows", "1", "--slice-tokens", "0") as daemon, daemon.client() as client:
        warm = client.generate([1], max_tokens=1_000_000)
        client.wait(lambda: (warm, 0) in client.tokens)
        before = fresh_gauge(client, "wkvm_core_resident_bytes")
        for _ in range(count):
            client.generate([1, 2, 3], max_tokens=10)
        client.wait(lambda: len(client.accepted) == count + 1, 60.0)
        after = fresh_gauge(client, "wkvm_core_resident_bytes")
        assert client.gauge("wkvm_requests_waiting") == count
        print(f"\na waiting request costs {(after - before) / count:.0f} bytes")
        assert (after - before) / count < 10 * 1024


@pytest.mark.long
@pytest.mark.timeout(900)
def test_memory_is_flat_and_nothing_leaks_over_five_minutes_of_load() -> None:
    rng = random.Random(1)
    with Daemon("--slots", "16", "--max-rows", "32", "--slice-tokens", "50") as daemon, daemon.client() as client:
        readings: list[tuple[float, float]] = []
        started = time.monotonic()
        live: list[int] = []
        while time.monotonic() - started < 300.0:
            for _ in range(8):
                n = rng.choice([1, 1, 1, 3])
                stop = rng.choice([(), (), (b"ab", b"e\n", b"xyz"), (bytes([rng.randrange(33, 127)]),)])
                live.append(
                    client.generate(
                        [rng.randrange(1, 256) for _ in range(rng.choice([1, 5, 60, 900]))],
                        max_tokens=rng.choice([1, 20, 300]),
                        n=n,
                        temperature=rng.choice([0.0, 1.0]),
                        repetition_penalty=rng.choice([1.0, 1.2]),
                        stop_texts=stop,
                        priority=rng.choice([0, 0, 1]),
                        save_as="s" if n == 1 and rng.random() < 0.02 and len(readings) < 3 else "",
                    )
                )
            for request in rng.sample(live, 2):
                client.cancel(request)
            end = time.monotonic() + 0.2
            while time.monotonic() < end:
                client.poll()
            live = [request for request in live if not client.done(request)][-300:]
            if len(readings) < (time.monotonic() - started) // 30:
                readings.append((time.monotonic() - started, fresh_gauge(client, "wkvm_core_resident_bytes")))
                client.tokens.clear()
                client.finished.clear()
                client.accepted.clear()
                live.clear()
        stats = settled(client)
    for seconds, resident in readings:
        print(f"\nafter {seconds:4.0f} s: {resident / 2**20:.1f} MiB resident", end="")
    gauges = stats.core.gauges
    assert gauges["wkvm_slots_used"] == gauges["wkvm_requests_running"] == gauges["wkvm_requests_waiting"] == 0
    assert gauges["wkvm_lanes_free"] == 32
    assert gauges["wkvm_host_blocks_used"] == gauges["wkvm_states_named"]
    print(f"\n{stats.core.counters['wkvm_generated_tokens_total']:.0f} tokens, {stats.core.counters}")
    early, late = readings[2][1], readings[-1][1]
    assert abs(late - early) / early < 0.02
