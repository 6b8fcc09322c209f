"""The tables of a ledger file, and how an event becomes a line of them.

    sqlite3 RUN/ledger.sqlite "SELECT state, count(*) FROM prompts GROUP BY state"
    sqlite3 RUN/ledger.sqlite "SELECT step, avg(reward) FROM rows GROUP BY step"
    sqlite3 RUN/ledger.sqlite "SELECT message FROM turns WHERE slot = 7 AND row = 0"

Conditions on ``rows`` select batches: :func:`buffers.ledger_query.query`, or ``query`` of a ledger or a replay buffer.

``events``        the truth, in order, never changed. ``body`` is the event as JSON (:mod:`asyncrl.ledger`); ``kind``,
                  ``slot`` and ``step`` are read from it. ``checksum`` is the XXH3-64 of sequence and body, seeded with
                  the checksum of the event before: a line that is changed, lost or moved breaks the chain.
``trajectories``  the rows of completed attempts (columns: :class:`asyncrl.rollout.record.RowRecord`); the ``digest`` in
                  the ``completed`` event is the XXH3-64 of all rows of the group, encoded.
``unfinished``    turns of prompts under way (``body``: :func:`asyncrl.rollout.turns.encode_turns`), by the number of
                  their ``turns`` event, whose ``digest`` is the XXH3-64 of the body; for as long as one of these
                  prompts is under way.
``prompts``       view: the state of each prompt now, and where and when it was used.
``rows``          view: ``trajectories`` of the attempts that won, beside the state of their prompt.
``turns``         view: one line for each sampled turn of ``rows``.
``sampled_turns`` view: one line for each turn that was told as it ended, whatever became of it.
``batches``       view: which prompts each step trained on, in order (``use`` > 0: not for the first time).
"""

from __future__ import annotations

import msgspec
import xxhash

from asyncrl.errors import CodecError
from asyncrl.ledger import LedgerEvent

__all__ = ["FORMAT", "SCHEMA", "chain", "decode_event", "digest", "encode_event", "signed"]

FORMAT = 3
"""``PRAGMA user_version`` of a file with these tables."""

SCHEMA = """
CREATE TABLE events (
  sequence INTEGER PRIMARY KEY,
  body TEXT NOT NULL,
  checksum INTEGER NOT NULL,
  kind TEXT GENERATED ALWAYS AS (json_extract(body, '$.type')) VIRTUAL,
  slot INTEGER GENERATED ALWAYS AS (json_extract(body, '$.slot')) VIRTUAL,
  step INTEGER GENERATED ALWAYS AS (json_extract(body, '$.step')) VIRTUAL
) STRICT;

CREATE TABLE trajectories (
  slot INTEGER NOT NULL,
  attempt INTEGER NOT NULL,
  row INTEGER NOT NULL,
  reward REAL NOT NULL,
  finish_reason TEXT NOT NULL,
  tokens INTEGER NOT NULL,
  oldest_version INTEGER NOT NULL,
  newest_version INTEGER NOT NULL,
  turns TEXT NOT NULL,
  spans TEXT NOT NULL,
  task TEXT NOT NULL,
  info BLOB NOT NULL,
  input_ids BLOB NOT NULL,
  log_probs BLOB NOT NULL,
  PRIMARY KEY (slot, attempt, row)
) STRICT;

CREATE TABLE unfinished (
  sequence INTEGER PRIMARY KEY,
  body BLOB NOT NULL
) STRICT;

CREATE VIEW batches AS
  SELECT e.step, json_extract(e.body, '$.position') AS position, e.slot,
         row_number() OVER (PARTITION BY e.slot ORDER BY e.sequence) - 1 AS use, e.sequence
  FROM events e
  WHERE e.kind IN ('consumed', 'reused')
    AND NOT EXISTS (SELECT 1 FROM events r WHERE r.kind = 'resumed' AND r.sequence > e.sequence AND r.step < e.step);

CREATE VIEW prompts AS
  WITH winner AS (
    SELECT slot, max(sequence) AS sequence FROM events WHERE kind IN ('completed', 'lost') GROUP BY slot
  ), ended AS (
    SELECT slot, max(sequence) AS sequence FROM events WHERE kind IN ('dropped', 'given_up') GROUP BY slot
  ), under_way AS (
    SELECT slot, max(sequence) AS sequence FROM events
    WHERE kind IN ('dispatched', 'failed', 'aborted') GROUP BY slot
  )
  SELECT i.slot,
         CASE WHEN ended.slot IS NOT NULL THEN d.kind
              WHEN b.step IS NOT NULL AND b.step <= (SELECT max(step) FROM events WHERE kind = 'committed')
                THEN 'committed'
              WHEN b.step IS NOT NULL THEN 'consumed'
              WHEN c.kind = 'completed' THEN 'completed'
              WHEN u.kind = 'dispatched' AND u.sequence > coalesce(c.sequence, 0)
                AND u.sequence > (SELECT coalesce(max(sequence), 0) FROM events WHERE kind = 'resumed')
                THEN 'dispatched'
              ELSE 'issued' END AS state,
         coalesce(json_extract(d.body, '$.reason'), json_extract(d.body, '$.failure')) AS reason,
         CASE WHEN c.kind = 'completed' THEN json_extract(c.body, '$.attempt') END AS attempt,
         b.step, b.position
  FROM events i
  LEFT JOIN winner ON winner.slot = i.slot LEFT JOIN events c ON c.sequence = winner.sequence
  LEFT JOIN ended ON ended.slot = i.slot LEFT JOIN events d ON d.sequence = ended.sequence
  LEFT JOIN under_way ON under_way.slot = i.slot LEFT JOIN events u ON u.sequence = under_way.sequence
  LEFT JOIN batches b ON b.slot = i.slot AND b.use = 0
  WHERE i.kind = 'issued';

CREATE VIEW rows AS
  SELECT t.*, p.state, p.step, p.position
  FROM prompts p JOIN trajectories t ON t.slot = p.slot AND t.attempt = p.attempt;

CREATE VIEW turns AS
  SELECT r.slot, r.row, r.attempt, j.key AS turn, json_extract(j.value, '$[0]') AS first_token,
         json_extract(j.value, '$[1]') AS end_token, json_extract(j.value, '$[2]') AS finish_reason,
         json_extract(j.value, '$[3]') AS message
  FROM rows r, json_each(r.turns) j;

CREATE VIEW sampled_turns AS
  SELECT e.sequence, json_extract(j.value, '$[0]') AS slot, json_extract(j.value, '$[1]') AS attempt,
         json_extract(j.value, '$[2]') AS row, json_extract(j.value, '$[3]') AS turn,
         json_extract(j.value, '$[4]') AS tokens
  FROM events e, json_each(e.body, '$.turns') j WHERE e.kind = 'turns';
"""


def encode_event(event: LedgerEvent) -> str:
    """The ``body`` of an event."""
    return _ENCODER.encode(event).decode()


def decode_event(body: str) -> LedgerEvent:
    """The event of a ``body``.

    Raises:
        CodecError: it is none.
    """
    try:
        return _DECODER.decode(body)
    except msgspec.MsgspecError as error:
        raise CodecError(f"not an event of a ledger: {error}") from error


def chain(before: int, sequence: int, body: str) -> int:
    """The ``checksum`` of an event, given the one of the event before (0 for the first)."""
    return signed(xxhash.xxh3_64_intdigest(sequence.to_bytes(8, "little") + body.encode(), seed=before % 2**64))


def digest(rows: bytes) -> int:
    """The ``digest`` of the rows of a group."""
    return signed(xxhash.xxh3_64_intdigest(rows))


def signed(number: int) -> int:
    """64 bits as SQLite keeps them."""
    return number - 2**64 if number >= 2**63 else number


_ENCODER = msgspec.json.Encoder()
_DECODER: msgspec.json.Decoder[LedgerEvent] = msgspec.json.Decoder(LedgerEvent)
