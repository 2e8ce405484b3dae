"""Steers a running swarm through one of its nodes: looks at it, holds it, changes how it agrees, saves it.

python scripts/drive_swarm.py 127.0.0.1:7700 policy.safetensors
"""

import sys

import p2pdrl

node = p2pdrl.Client(sys.argv[1])
print(node.status().state, {peer.name: peer.state for peer in node.peers()}, node.roles())
node.pause(swarm=True)
print("acts:", node.act([0.0, 0.0, 0.05, 0.0], deterministic=True))
node.resume(swarm=True)
mode = node.set_mode("allreduce", protocol="param_average", every_updates=4)
print("agrees by", mode.protocol, {member.name: member.follows for member in mode.members})
print("saved", node.checkpoint(sys.argv[2]))
print("last events:", [event.kind for event in node.events()][-5:])
node.leave()
