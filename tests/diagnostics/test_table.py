import pytest

from jaxcomm.diagnostics import table


def test_html_is_escaped():
    drawn = table.as_html(("a<b",), [("c&d",)])
    assert drawn == (
        "<table><thead><tr><th>a&lt;b</th></tr></thead>"
        "<tbody><tr><td>c&amp;d</td></tr></tbody></table>"
    )


def test_a_table_without_rows_has_its_head():
    assert table.text(("one", "two"), []) == "one  two\n---  ---"


@pytest.mark.parametrize(
    ("values", "text"),
    [([], ""), ([4], "4"), ([1, 0], "0, 1"), ([5, 3, 4, 5], "3-5"), ([1, 3], "1, 3")],
)
def test_numbers_are_listed_in_order(values, text):
    assert table.numbers(values) == text


def test_milliseconds_carry_over():
    assert table.clock(59.9996).endswith(":00.000")
    assert table.clock(59.9994).endswith(":59.999")
