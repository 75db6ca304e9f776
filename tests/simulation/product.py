"""What is simulated."""

from dataclasses import dataclass
from typing import Any

from engine.assembly import make_residency
from engine.swap import Mover
from recovery.checkpointer import Checkpointer
from service.worker.store_thread import StoreThread
from storage.memory_store import MemoryJobStore
from storage.pool_file import PoolFile
from tests.simulation.network import Connection


@dataclass(frozen=True)
class Product:
    """A test that removes a mechanism puts another part in the place of one."""

    store: Any = MemoryJobStore
    pool_file: Any = PoolFile
    residency: Any = make_residency
    mover: Any = Mover
    checkpointer: Any = Checkpointer
    store_thread: Any = StoreThread
    connection: Any = Connection


PRODUCT = Product()
