"""Moves messages between nodes: metadata and long vectors, authenticated and bounded.

- `protocol`: the one page to read first: `Transport`, `Address`, `Incoming`, `Reply`, `Refusal`.
- `memory`: a network inside one process with loss, delay, cuts and frozen nodes.
- `http_transport`: the real one: `HttpTransport` joins `http_client` and `http_server`.
- `auth`, `headers`, `pieces`: what a request carries, how it is signed, how vectors are cut.
- `listener`, `watchdog`, `guard`, `limits`: the port, slow or too many connections, foreign
  hosts and origins, and every bound in one place.
- `dial`: names to addresses, and addresses that are never dialled.
- `counters`: bytes by peer.

Membership and strategies import `protocol`; only the node imports the rest.
"""
