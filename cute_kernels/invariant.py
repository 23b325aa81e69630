"""Objects that a dynamic loop may use without carrying them around the loop."""


class LoopInvariant:
    """Mixin for objects whose traced values are all made before the loops that call their methods.

    The DSL carries every object on which a loop body calls a method around that loop, value by value. Such an
    object changes only what it points to (register or shared memory), never what it holds, so nothing has to be
    carried: it extracts to no values and is rebuilt as itself.
    """

    def __extract_mlir_values__(self) -> list:
        return []

    def __new_from_mlir_values__(self, values: list) -> "LoopInvariant":
        return self
