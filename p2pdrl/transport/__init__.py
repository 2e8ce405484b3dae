"""Moves messages between nodes: metadata and long vectors, authenticated and bounded.

- `protocol`: the one page to read first: `Transport`, `Address`, `Incoming`, `Reply`, `Refusal`.
- `testing.memory_transport`: a network inside one process with loss, delay, cuts and frozen nodes.
- `http_transport`: the real one; it joins `http.client` and `http.server`.
- `stream.client` (`stream.client`) and `stream.server` (`stream.server`): the bulk
  lane's calls, framed on an upgraded connection; `stream.frames`: their bytes; `stream.socket`: moves them.
- `pipe.ticket`: a connection that the daemon opens (`pipe.opening`) and another process uses by
  `pipe.end` (`pipe.end` over one `pipe.end`); `pipe.frames`: its bytes.
- `http.upgrade`: both ends of the request that makes a connection a stream or a pipe.
- `calls`, `http.headers`: a call on its way out, what proves it and its answer, a request as
  its handler sees it.
- `routes`: what is served, and how a handler's failure is told; shared by both.
- `codec`, `auth`, `http.headers`: what a request carries, how it is read and signed; `pieces`, `filling`,
  `http.body`: how vectors are cut, put together again, and carried by posted calls.
- `http.listener`, `http.watchdog`, `http.guard`: the port; too many or too slow connections; foreign
  hosts and origins.
- `admission`, `limits`, `counters`: how much one peer may ask, every bound, bytes by peer.
- `dial`, `stream.socket`: names to addresses, and addresses that are never dialled; how sockets are set up.
- `testing.fault_proxy`: the faults of a network before a real node, for tests and benchmarks.

Membership and strategies import `protocol`, learner processes `pipe.end`; only the node imports the rest.
"""
