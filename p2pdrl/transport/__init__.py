"""Moves messages between nodes: metadata and long vectors, authenticated and bounded.

| module | holds |
|---|---|
| `protocol` | to be read first: `Transport`, `Address`, `Incoming`, `Reply`, `Refusal` |
| `http_transport` | the real transport; `testing.memory_transport` is the one inside a single process |
| `framing` | the bytes of posts, streams and pipes: heads, pieces of vectors, where arriving bytes go |
| `tls`, `cipher`, `opening` | who is who; sealing of messages and pieces; how streams and pipes begin |
| `auth`, `codec`, `limits` | signed requests to the API; decoding of metadata; every bound |
| `rate` | bytes a second, over all connections and processes of a node |
| `calls`, `dial` | outgoing calls, served routes, rates; names to addresses that may be dialled |
| `http.headers`, `http.body` | head and body of a posted call |
| `http.server`, `http.listener`, `http.guard` | peer routes; the port and slow connections; foreign origins |
| `stream.client`, `stream.server`, `stream.socket` | many calls over one connection: the bulk lane |
| `pipe.ticket`, `pipe.server` | a connection that the daemon opens and another process uses |
| `pipe.end`, `pipe.frames` | that process's end of it, and its messages |

Membership and strategies import `protocol`, learner processes `pipe.end`; only the node imports the rest.
"""
