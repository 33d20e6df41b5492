"""`my_engine`, which now shows its books and loses the first block of every table."""

import msgspec
from my_engine import Life, MyEngine

from kvconform import Capabilities


class MyLeakyEngine(MyEngine):
    """The same engine with one fault."""

    @property
    def capabilities(self) -> Capabilities:
        declared = super().capabilities
        return msgspec.structs.replace(declared, features=declared.features | {"snapshot"})

    def end(self, life: Life) -> None:
        """Take the blocks of a request back, all but the first."""
        super().end(life)
        self.free.remove(life.table[0])


make = MyLeakyEngine
