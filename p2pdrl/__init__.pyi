from p2pdrl.library.client import Client as Client
from p2pdrl.library.names import register_env as register_env
from p2pdrl.library.names import register_network as register_network
from p2pdrl.library.policy import TrainedPolicy as TrainedPolicy
from p2pdrl.library.policy import load as load
from p2pdrl.library.run import Run as Run
from p2pdrl.library.run import train as train

__all__ = [
    "Client",
    "Run",
    "TrainedPolicy",
    "__version__",
    "load",
    "register_env",
    "register_network",
    "train",
]

__version__: str
