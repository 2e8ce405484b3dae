"""Moves messages between nodes: metadata and long vectors, authenticated and bounded.

- `protocol`: the one page to read first: `Transport`, `Address`, `Incoming`, `Reply`, `Refusal`.
- `memory`: a network inside one process with loss, delay, cuts and frozen nodes.
- `http_transport`: the real one; it joins `http_client` and `http_server`.
- `stream_client` (`stream_opener`, `stream_caller`) and `stream_server` (`stream_served`): the bulk
  lane's calls, framed on an upgraded connection; `stream_frames`: their bytes; `stream_socket`: moves them.
- `pipe`: a connection that the daemon opens (`pipe_opener`, `pipe_server`) and another process uses by
  `pipe_end` (`pipe_sender`, `pipe_receiver` over one `pipe_link`); `pipe_frames`, `pipe_parser`: its bytes.
- `upgrading`, `takeover`: both ends of the request that makes a connection a stream or a pipe.
- `outgoing`, `credentials`, `incoming`: a call on its way out, what proves it and its answer, a request as
  its handler sees it.
- `routes`: what is served, and how a handler's failure is told; shared by both.
- `codec`, `auth`, `headers`: what a request carries, how it is read and signed; `pieces`, `filling`,
  `body`: how vectors are cut, put together again, and carried by posted calls.
- `listener`, `watchdog`, `pace`, `guard`: the port; too many or too slow connections; foreign
  hosts and origins.
- `admission`, `limits`, `counters`: how much one peer may ask, every bound, bytes by peer.
- `dial`, `socket_options`: names to addresses, and addresses that are never dialled; how sockets are set up.
- `fault_proxy`: the faults of a network before a real node, for tests and benchmarks.

Membership and strategies import `protocol`, learner processes `pipe_end`; only the node imports the rest.
"""
