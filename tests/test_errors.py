import weakref

from app.errors import Fault, let_go


class Large:
    pass


def broken() -> tuple[Fault, list[weakref.ref[Large]]]:
    """An error in whose causes and contexts frames hold something."""
    held = []

    def fails(error: Exception, cause: Exception | None = None) -> None:
        large = Large()
        held.append(weakref.ref(large))
        raise error from cause

    def raised(error: Exception) -> Exception:
        try:
            fails(error)
        except Exception as found:  # noqa: BLE001  whatever it was
            return found
        raise AssertionError

    cause = raised(KeyError("the cause"))
    try:
        try:
            fails(OSError("the context"))
        except OSError:
            fails(ValueError("the error"), cause)
    except ValueError as error:
        return Fault.of(error), held  # never raised itself
    raise AssertionError


def test_an_error_that_is_kept_holds_nothing_of_what_it_came_through(no_collections):
    error, held = broken()
    assert len([one for one in held if one() is not None]) == 3
    let_go(error)
    assert [one() for one in held] == [None] * 3
    assert str(error.__cause__.__context__) == "the context"


def test_errors_that_caused_each_other_are_let_go_once():
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__context__ = other, one
    let_go(one)  # it ends
