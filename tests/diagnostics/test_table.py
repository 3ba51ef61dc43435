from jaxcomm.communicator import text_table as table


def test_a_table_without_rows_has_its_head_and_html_is_escaped():
    assert table.text(("one", "two"), []) == "one  two\n---  ---"
    assert table.as_html(("a<b",), [("c&d",)]) == (
        "<table><thead><tr><th>a&lt;b</th></tr></thead>"
        "<tbody><tr><td>c&amp;d</td></tr></tbody></table>"
    )


def test_numbers_are_listed_in_order_and_milliseconds_carry_over():
    listed = [table.numbers(of) for of in ([], [4], [1, 0], [5, 3, 4, 5], [1, 3])]
    assert listed == ["", "4", "0, 1", "3-5", "1, 3"]
    assert table.clock(59.9996).endswith(":00.000")
    assert table.clock(59.9994).endswith(":59.999")
