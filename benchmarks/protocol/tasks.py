"""Prompts for measurements of speculation: a few of each task, written for this benchmark."""

from collections.abc import Mapping, Sequence

from enginewright.runtime.core.prompts import Prompt

CODE = [
    '''import heapq


def shortest_paths(graph, source):
    """Distances from source to every node it reaches, by Dijkstra's algorithm.

    graph: for each node, a dict from its neighbours to the lengths of the edges.
    """
''',
    '''from dataclasses import dataclass


@dataclass
class Interval:
    """Numbers from start up to end, without end."""

    start: float
    end: float

    def overlaps(self, other: "Interval") -> bool:
        return self.start < other.end and other.start < self.end

    def union(self, other: "Interval") -> "Interval":
''',
    '''import csv
from collections import defaultdict


def totals_by_customer(path):
    """Read orders from a CSV file with the columns customer, price and quantity; sum them up for each customer."""
''',
    """#include <string>
#include <vector>

// Splits a line of text at a separator. Quoted parts are not split, and lose their quotes.
std::vector<std::string> split(const std::string& line, char separator) {
""",
]

PROSE = [
    "The lighthouse keeper had not spoken to anyone for eleven days when the boat appeared. At first",
    "Bread needs four things: flour, water, salt and time. Of these, time is the one that people forget, because",
    "In the spring of that year the river rose higher than anyone in the village could remember.",
    "Most people who move from a small town to a large city are surprised by the same thing:",
]

# An order, and the text that it is about.
_ORDERS = [
    (
        "Rename the variable `total` to `balance`.",
        """class Account:
    def __init__(self, owner):
        self.owner = owner
        self.total = 0
        self.history = []

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.total += amount
        self.history.append(("deposit", amount))

    def withdraw(self, amount):
        if amount > self.total:
            raise ValueError("not enough money")
        self.total -= amount
        self.history.append(("withdraw", amount))
""",
    ),
    (
        "Add a parameter `timeout` with the default 30 to both functions, and hand it to `requests`.",
        """import requests

BASE = "https://example.org/api/v1"


def get_user(user_id):
    response = requests.get(f"{BASE}/users/{user_id}")
    response.raise_for_status()
    return response.json()


def create_user(name, email):
    response = requests.post(f"{BASE}/users", json={"name": name, "email": email})
    response.raise_for_status()
    return response.json()
""",
    ),
    (
        "Turn the port into 8443, and add `tls: true` under `server`.",
        """server:
  host: 0.0.0.0
  port: 8080
  workers: 4
  request_timeout_seconds: 60
logging:
  level: info
  format: json
  file: /var/log/shop/server.log
database:
  host: db.internal
  port: 5432
  name: shop
  pool_size: 10
""",
    ),
    (
        "Correct the two spelling mistakes.",
        """The library opens at nine in the morning and closes at six in the evening, except on Sundays. Books may be
borrowed for four weeks, and kept for two weeks more if nobody else has asked for them. Who returns a book too late pays
ten cents for every day. Newspapers and dictionarys cannot be borrowed, but there are enough tables to read them here.
Please do not eat or drink in the reading rooms, and speak quitely.
""",
    ),
]
EDIT = [
    [{"role": "user", "content": f"{order} Answer with the whole text as it is then, and nothing else.\n\n{text}"}]
    for order, text in _ORDERS
]

TASKS: Mapping[str, Sequence[Prompt]] = {"code": CODE, "edit": EDIT, "prose": PROSE}
