from rollart.sandbox.shell import OutputBuffer


def written(*pieces, limit=20):
    output = OutputBuffer(limit)
    for piece in pieces:
        output.add(piece)
    return output


def test_short_output_is_shown_as_it_is():
    assert written(b"one\n", b"two\n").text() == "one\ntwo\n"


def test_of_long_output_the_beginning_and_the_end_are_shown():
    assert written(b"0123456789", b"x" * 1000, b"abcdefghij").text() == (
        "0123456789\n[... 1,000 bytes left out ...]\nabcdefghij"
    )


def test_no_more_than_a_few_times_the_limit_is_kept():
    output = written(*[b"y" * 65536] * 100)
    assert output.total == 6_553_600
    assert len(output._head) + len(output._tail) < 200_000


def test_control_characters_are_escaped():
    assert written(b"\x1b[31m\xff\0 \xc3\xa9\t\n").text() == "\\x1b[31m\\xff\\x00 é\t\n"
