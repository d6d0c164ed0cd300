"""Connections that a run did not ask for: python tests/strangers.py KIND ADDRESS:PORT ...

Sends what a kind of stranger sends to each place, says how many connections it made, and keeps them
open until its input ends. test_security.py starts it, in a network namespace of its own.
"""

import contextlib
import random
import socket
import ssl
import sys
import time


def make_tls_hello():
    """The first message of an https client."""
    received, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(received, sent, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return sent.read()


MESSAGES = {
    "HTTP": [b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"],
    "TLS": [make_tls_hello()],
    "random": [random.Random(seed).randbytes(4096) for seed in range(10)],
    "silent": [b""] * 10,
}
MESSAGES["all"] = sum(MESSAGES.values(), [])


def connect(place, message):
    """Sends a message to a place; returns the open connection, or None if nobody is there."""
    with contextlib.suppress(OSError):
        connection = socket.create_connection(place, timeout=1)
        connection.sendall(message)
        return connection


def storm(places, seconds=10, rate=1000):
    """Connects so often a second to each place, sends eight bytes and leaves; returns how often.

    The bytes of each storm are the same, because srun crashes at a few of the possible ones.
    """
    draw, made, tried, started = random.Random(0), 0, 0, time.monotonic()
    while (passed := time.monotonic() - started) < seconds:
        while tried < passed * rate * len(places) and time.monotonic() - started < seconds:
            if connection := connect(places[tried % len(places)], draw.randbytes(8)):
                connection.close()
                made += 1
            tried += 1
        time.sleep(0.001)
    return made


def main():
    kind, *addresses = sys.argv[1:]
    parts = [address.rpartition(":") for address in addresses]
    places = [(host, int(port)) for host, _, port in parts]
    if kind == "storm":
        made = storm(places)
    else:
        kept = [connect(place, message) for place in places for message in MESSAGES[kind]]
        made = sum(connection is not None for connection in kept)
    print(made, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
