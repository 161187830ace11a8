"""Pages in Prometheus's text format, read as a Prometheus server reads them."""

import urllib.request


class Scraped:
    """A page of metrics."""

    def __init__(self, text: str) -> None:
        from prometheus_client.parser import text_string_to_metric_families

        self.samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def value(self, name: str, **labels: str) -> float | None:
        return self.samples.get((name, frozenset(labels.items())))

    def total(self, name: str, **labels: str) -> float:
        """The sum over all samples that have these labels, and perhaps others."""
        return sum(
            value for (other, has), value in self.samples.items() if other == name and frozenset(labels.items()) <= has
        )


def scrape(url: str, token: str | None = None) -> Scraped:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
        return Scraped(answer.read().decode())
