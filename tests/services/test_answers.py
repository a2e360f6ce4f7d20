"""What came of a call is accepted, tried again or given up, by the lists of the protocol."""

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loops_cookbook.errors import ServiceRefused, ServiceUnavailable
from loops_cookbook.services.answers import (
    MOST_READ,
    Accept,
    Answer,
    GiveUp,
    Kind,
    TryAgain,
    decide,
    detail,
)

BAD_REQUEST = b'{"error":{"type":"BadRequestError","message":"no"}}'


class TestDecide:
    @pytest.mark.parametrize(
        ("kind", "statuses"),
        [
            ("submit", {400, 404, 408, 502}),
            ("poll", {502}),
            ("sample", {400, 404, 408, 502, 503}),
        ],
    )
    def test_the_statuses_of_the_protocol_are_retried_and_no_others(
        self, kind: Kind, statuses: set[int]
    ) -> None:
        every = range(300, 600)
        retried = {s for s in every if isinstance(decide(kind, Answer(s), 1), TryAgain)}
        assert retried == statuses

    @pytest.mark.parametrize(
        ("kind", "status", "is_accepted"),
        [
            ("submit", 200, True),
            ("submit", 202, True),
            ("poll", 200, True),
            ("poll", 202, True),
            ("poll", 408, True),
            ("sample", 200, True),
            ("sample", 202, False),
        ],
    )
    def test_what_counts_as_an_answer(self, kind: Kind, status: int, is_accepted: bool) -> None:
        assert isinstance(decide(kind, Answer(status), 1), Accept) == is_accepted

    @pytest.mark.parametrize("kind", ["submit", "poll", "sample"])
    @pytest.mark.parametrize(
        ("status", "error"),
        [
            (422, ServiceRefused),
            (401, ServiceRefused),
            (410, ServiceRefused),
            (301, ServiceRefused),
            (429, ServiceUnavailable),
            (500, ServiceUnavailable),
            (504, ServiceUnavailable),
        ],
    )
    def test_other_statuses_end_the_call(
        self, kind: Kind, status: int, error: type[Exception]
    ) -> None:
        decision = decide(kind, Answer(status), 1)
        assert isinstance(decision, GiveUp)
        assert decision.error is error

    def test_a_trainer_that_shuts_down_is_not_asked_again(self) -> None:
        assert decide("submit", Answer(503), 1) == GiveUp(ServiceUnavailable)
        assert decide("poll", Answer(503), 1) == GiveUp(ServiceUnavailable)

    @pytest.mark.parametrize(
        "answer",
        [
            Answer(400, {"x-baseten-error-source": "06"}),
            Answer(404, {"x-baseten-error-source": "06"}),
            Answer(408, {"x-baseten-error-source": "01", "x-baseten-error-code": "631"}),
            Answer(400, {}, b'{"type":"BadRequestError"}'),
            Answer(400, {}, BAD_REQUEST),
        ],
    )
    def test_an_answer_that_says_it_is_final_is_not_retried(self, answer: Answer) -> None:
        assert isinstance(decide("submit", answer, 1), GiveUp)

    @pytest.mark.parametrize(
        "answer",
        [
            Answer(404, {}, b'{"type":"BadRequestError"}'),
            Answer(400, {}, b'{"error":"BadRequestError"}'),
            Answer(400, {"x-baseten-error-source": "01", "x-baseten-error-code": "1"}),
            Answer(502, {"x-baseten-error-source": "06"}),
            Answer(400, {}, b"["),
        ],
    )
    def test_an_answer_that_only_resembles_a_final_one_is_retried(self, answer: Answer) -> None:
        assert isinstance(decide("submit", answer, 1), TryAgain)

    @pytest.mark.parametrize(
        ("failure", "submit", "poll"),
        [
            (httpx.ConnectError, True, True),
            (httpx.ConnectTimeout, True, True),
            (httpx.ReadError, True, True),
            (httpx.RemoteProtocolError, True, True),
            (httpx.ReadTimeout, False, True),
            (httpx.WriteTimeout, False, False),
            (httpx.PoolTimeout, False, False),
        ],
    )
    def test_broken_connections_are_retried_where_the_protocol_says(
        self, failure: type[httpx.RequestError], submit: bool, poll: bool
    ) -> None:
        broken = failure("")
        assert isinstance(decide("submit", broken, 1), TryAgain) == submit
        assert isinstance(decide("sample", broken, 1), TryAgain) == submit
        assert isinstance(decide("poll", broken, 1), TryAgain) == poll

    @settings(deadline=None)
    @given(st.integers(1, 10**6), st.floats(0, 1, exclude_max=True))
    def test_pauses_grow_to_thirty_seconds(self, attempt: int, chance: float) -> None:
        decision = decide("submit", Answer(502), attempt, chance)
        assert isinstance(decision, TryAgain)
        least = min(2.0 ** min(attempt - 1, 5), 30.0)
        assert least <= decision.pause <= min(least + 5.0, 30.0)

    def test_a_poll_that_finds_no_server_pauses_two_seconds(self) -> None:
        assert decide("poll", httpx.ReadError(""), 9, 0.9) == TryAgain(2.0)


class TestDetail:
    @pytest.mark.parametrize(
        ("body", "told"),
        [
            (b'{"detail":"a","error":"b"}', "a"),
            (b'{"detail":["a"],"error":"","message":"c"}', "c"),
            (b'{"other":1}', '{"other":1}'),
            (b"plain\n text", "plain text"),
            (b"", "no detail"),
            (b"\xff", "\N{REPLACEMENT CHARACTER}"),
        ],
    )
    def test_the_server_is_quoted_in_one_line(self, body: bytes, told: str) -> None:
        assert detail(Answer(500, {}, body)) == told

    def test_an_error_in_openai_form_is_read(self) -> None:
        assert detail(Answer(400, {}, b'{"error":{"type":"t","message":"a"}}')) == "a"

    @pytest.mark.parametrize("status", [301, 302, 307, 308])
    def test_an_address_that_has_moved_is_told_with_the_new_one(self, status: int) -> None:
        """`answered 301: no detail` was all that there was, of an http:// for an https://."""
        answer = Answer(status, {"location": "https://server/v1"}, b"<html>Moved</html>")
        assert detail(answer) == "it has moved to https://server/v1: name that address"

    def test_of_an_endless_page_no_more_is_read_than_is_told(self) -> None:
        body = b"<html>" + b"0" * MOST_READ + b'{"error": "at its end"}'
        assert len(detail(Answer(500, body=body))) == MOST_READ
        long = b'{"error": "no", "more": "' + b"0" * MOST_READ + b'"}'
        assert detail(Answer(500, body=long)).startswith('{"error": "no", "more": "000')
