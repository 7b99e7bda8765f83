"""Search by tantivy, for large catalogs: the same terms as `lucene-exact`, its own ranking.

tantivy's BM25 has k1 1.2 and b 0.75 and cannot be given others, so the order of results differs from
Lucene's. Queries are put together term by term: no text of an agent ever reaches a query parser.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from rollgym.core.errors import MissingExtra
from rollgym.envs.webshop.search.lucene import MAX_CHARACTERS, query_terms

NAME = "tantivy"
MEMORY = 2_000_000_000
"""Maximum memory of a build in bytes; above it the index has several segments."""

_TEXT, _NUMBER = "text", "number"


def tantivy_module() -> ModuleType:
    """The tantivy package, or how to get it."""
    try:
        import tantivy
    except ImportError as error:
        raise MissingExtra("Search engine 'tantivy'", "webshop") from error
    return tantivy


class TantivyBuilder:
    """Takes documents as lists of terms, in the order of their numbers, and writes the index."""

    def __init__(self, folder: Path, *, memory: int = MEMORY) -> None:
        self._tantivy = tantivy = tantivy_module()
        self._folder = folder
        builder = tantivy.SchemaBuilder()
        builder.add_text_field(_TEXT, tokenizer_name="whitespace", index_option="freq")
        builder.add_unsigned_field(_NUMBER, fast=True)
        # Within a segment, equal scores come in the order of documents: keep that the order of numbers.
        index = tantivy.Index(builder.build(), path=str(folder), sort_by_field=_NUMBER)
        self._writer = index.writer(heap_size=memory, num_threads=1)
        self._count = 0

    def add(self, terms: Sequence[str]) -> None:
        """The next document."""
        entry = self._tantivy.Document()
        entry.add_text(_TEXT, " ".join(terms))
        entry.add_unsigned(_NUMBER, self._count)
        self._writer.add_document(entry)
        self._count += 1

    def finish(self, names: Sequence[str] | None = None) -> None:
        """Write everything; names play no part, equal scores are ordered by number."""
        self._writer.commit()
        self._writer.wait_merging_threads()
        # tantivy makes its two metadata files private, so other users could not open the index.
        mode = (self._folder / ".tantivy-writer.lock").stat().st_mode
        for name in ("meta.json", ".managed.json"):
            (self._folder / name).chmod(mode)

    def abandon(self) -> None:
        """Abort and wait for pending writes; the folder is not an index."""
        del self._writer


class TantivyIndex:
    """An opened index; any number of environments and threads may share it."""

    name = NAME

    def __init__(self, folder: Path, *, cache: int = 256) -> None:
        self._tantivy = tantivy_module()
        index = self._tantivy.Index.open(str(folder))
        # By hand, that is never: no thread that watches a folder which does not change.
        index.config_reader(reload_policy="manual")
        index.reload()
        self._schema = index.schema
        self._searcher = index.searcher()
        self.count: int = self._searcher.num_docs
        self._find = lru_cache(maxsize=cache)(self._search)

    def find(self, words: str, count: int = 50) -> list[tuple[int, float]]:
        """Document numbers with their scores, best first; any text is a bag of words."""
        return list(self._find(words[:MAX_CHARACTERS], count))

    def _search(self, words: str, count: int) -> tuple[tuple[int, float], ...]:
        terms = [(term, times) for term, times in query_terms(words) if self._searcher.doc_freq(_TEXT, term)]
        if not terms or count < 1:
            return ()
        should = self._tantivy.Occur.Should
        query = self._tantivy.Query.boolean_query([(should, self._clause(*term)) for term in terms])
        hits = self._hits(query, min(count, self.count))
        numbers = self._searcher.fast_field_values(_NUMBER, [address for _, address in hits])
        scored = zip(numbers, (score for score, _ in hits), strict=True)
        return tuple(sorted(scored, key=lambda hit: (-hit[1], hit[0]))[:count])

    def _clause(self, term: str, times: int) -> Any:
        """A term, weighted by how often the query has it."""
        query = self._tantivy.Query
        term_query = query.term_query(self._schema, _TEXT, term, "freq")
        return term_query if times == 1 else query.boost_query(term_query, float(times))

    def _hits(self, query: Any, count: int) -> list[tuple[float, Any]]:
        """The best; of several segments more, until no equal score is cut off that has a lower number."""
        limit = count
        while True:
            hits: list[tuple[float, Any]] = self._searcher.search(query, limit, count=False).hits
            complete = self._searcher.num_segments == 1 or len(hits) < limit or limit >= self.count
            if complete or hits[-1][0] < hits[count - 1][0]:
                return hits
            limit = min(limit * 4, self.count)
