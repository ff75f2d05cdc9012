"""Expressions over nested columns, drawn at random."""

from __future__ import annotations

from random import Random

TYPES = {
    "c": "int",
    "s": "string",
    "xs": "array<int>",
    "ys": "array<int>",
    "words": "array<string>",
    "grid": "array<array<int>>",
    "m": "map<string,int>",
    "attributes": "map<string,struct<v:int,w:array<string>>>",
    "customer": "struct<id:bigint,address:struct<city:string,`post code`:string>>",
    "items": "array<struct<sku:string,price:decimal(10,2),tags:array<string>>>",
}
DDL = ", ".join(f"{name} {kind}" for name, kind in TYPES.items())

_LEAVES = [
    *TYPES,
    *("customer.address", "customer.address.city", "customer.ADDRESS.`post code`", "items.price"),
    *("items[0]", "items[0].price", "items[c].tags", "xs[0]", "grid[0]", "grid[0][1]"),
    *("m['a']", "m.a", "attributes['a'].v", "attributes.a.w", "customer['id']", "items['sku']"),
    *("array()", "array(1, 2)", "array(null)", "map('a', 1)", "named_struct('a', 1, 'b c', s)"),
    *(
        "customer.adress",
        "items.prize",
        "items[0].prize",
        "xs.a",
        "c.a",
        "m[0]",
        "1",
        "'a'",
        "null",
    ),
]
_SHAPES = [
    *("{}[0]", "{}['a']", "element_at({}, 1)", "element_at({}, 'a')", "try_element_at({}, 1)"),
    *("get({}, 0)", "size({})", "cardinality({})", "array_contains({}, {})", "flatten({})"),
    *("reverse({})", "concat({}, {})", "slice({}, 1, 2)", "array_distinct({})", "array_sort({})"),
    *("array_union({}, {})", "array_except({}, {})", "array_intersect({}, {})", "array_max({})"),
    *("array_append({}, {})", "array_prepend({}, {})", "array_remove({}, {})", "array({}, {})"),
    *("array_repeat({}, 2)", "array_insert({}, 1, {})", "array_compact({})", "sort_array({})"),
    *("array_position({}, {})", "array_join({}, ',')", "arrays_zip({}, {})", "sequence(1, {})"),
    *("map_keys({})", "map_values({})", "map_entries({})", "map_from_entries({})"),
    *("map_from_arrays({}, {})", "map_concat({}, {})", "map('a', {}, 'b', {})", "map(s, {})"),
    *("map_contains_key({}, 'a')", "map_filter({}, (k, v) -> k > 'a')", "str_to_map(s)"),
    *("transform_values({}, (k, v) -> v)", "transform_values({}, (k, v) -> struct(k as k, v as v))"),
    *("transform_keys({}, (k, v) -> upper(k))", "transform_keys({}, (k, v) -> length(k))"),
    *("map_zip_with({}, {}, (k, a, b) -> array(a, b))", "map_zip_with({}, {}, (k, a, b) -> b)"),
    *("filter({}, x -> x is not null)", "filter({}, (x, i) -> i > 0)", "exists({}, x -> x is null)"),
    *("forall({}, x -> x is null)", "transform({}, x -> x)", "transform({}, (x, i) -> i)"),
    *("transform({}, x -> x.price)", "transform({}, x -> struct(x as a))", "transform({}, x -> x[0])"),
    *("zip_with({}, {}, (x, y) -> x)", "zip_with({}, {}, (x, y) -> coalesce(x, y))"),
    *("aggregate({}, 0, (a, x) -> a + 1)", "aggregate({}, 0L, (a, x) -> a + x)"),
    *("aggregate({}, 0, (a, x) -> a, a -> a * 2.5)", "reduce({}, {}, (a, x) -> a)"),
    *("named_struct('a', {}, 'b', {})", "struct({} as a, s)", "struct({}, {})", "struct(customer.id)"),
    *("named_struct('a', {}).a", "named_struct('a', {}).z", "to_json({})", "coalesce({}, {})"),
    *("case when c > 1 then {} else {} end", "if(c > 1, {}, {})", "nvl({}, {})", "nullif({}, {})"),
    *("cast({} as array<bigint>)", "cast({} as array<string>)", "cast({} as map<string, bigint>)"),
    *("cast({} as struct<a: bigint, b: array<int>>)", "try_cast({} as array<struct<a: int>>)"),
    *("from_json(s, 'a array<int>, b struct<c: string>')", "from_json(s, 'array<struct<a: int>>')"),
    *("from_json(s, 'map<string, array<int>>')", "from_json({}, 'a int')", "{} = {}", "{} in ({})"),
    *("{} is null", "{} + 1", "({}).a", "collect_list({}) over (partition by c)"),
    *("greatest({}, {})", "max({}) over (partition by c)", "sentences(s)", "shuffle({})"),
]  # fmt: skip


# Calls with lambdas, the kind of their result, and the variables with the argument that each is a
# part of.
_CALLS = [
    ("transform({}, x -> {})", "any", {"x": 0}),
    ("transform({}, (x, i) -> {})", "any", {"x": 0, "i": None}),
    ("filter({}, x -> {})", "boolean", {"x": 0}),
    ("filter({}, (x, i) -> {})", "boolean", {"x": 0, "i": None}),
    ("exists({}, x -> {})", "boolean", {"x": 0}),
    ("forall({}, x -> {})", "boolean", {"x": 0}),
    ("array_sort({}, (x, y) -> {})", "int", {"x": 0, "y": 0}),
    ("zip_with({}, {}, (x, y) -> {})", "any", {"x": 0, "y": 1}),
    ("aggregate({}, 0, (a, x) -> {})", "int", {"a": None, "x": 0}),
    ("aggregate({}, {}, (a, x) -> {})", "any", {"a": None, "x": 0}),
    ("aggregate({}, named_struct('b', 0), (a, x) -> named_struct('c', 1), a -> {})", "any", {"a": None}),
    ("map_filter({}, (k, v) -> {})", "boolean", {"k": None, "v": 0}),
    ("transform_values({}, (k, v) -> {})", "any", {"k": None, "v": 0}),
    ("transform_keys({}, (k, v) -> {})", "any", {"k": None, "v": 0}),
    ("map_zip_with({}, {}, (k, x, y) -> {})", "any", {"k": None, "x": 0, "y": 1}),
    ("exists({}, (x, y) -> {})", "boolean", {"x": 0, "y": None}),
    ("map_filter({}, x -> {})", "boolean", {"x": 0}),
]  # fmt: skip
_PARTS = {
    "items": ["{}", "{}.sku", "{}.price", "{}.tags", "{}['price']", "{}.PRICE"],
    "grid": ["{}", "{}[0]"],
    "attributes": ["{}", "{}.v", "{}.w"],
    "map('a', items)": ["{}", "{}[0].sku", "{}.price"],
}
_ARRAYS = ["items", "items", "xs", "words", "grid", "items.tags"]
_MAPS = ["m", "attributes", "attributes", "map('a', items)"]
_OF_VARIABLE = [
    *("{}", "{}.price", "{}.prize", "{}.sku", "{}.tags", "{}.w", "{}.v", "{}['sku']", "{}['w']"),
    *("{}[0]", "{}.sku.a", "{}.b", "{}.`B`"),
]
_BODIES = {
    "boolean": [
        *("{} is null", "{} = {}", "{} > 1", "{} and {}", "not {}", "{} in (1, 2)", "{} <=> {}"),
        *("array_contains({}, {})", "size({}) > 0", "cast({} as string) = 'a'", "{} is null and {} > 0"),
    ],
    "int": ["{}", "size({})", "c", "length({})", "a + {}", "cast({} as int)", "1"],
    "any": [
        *("{}", "{}", "{} * 2", "upper({})", "size({})", "({}).sku", "coalesce({}, {})", "- {}"),
        *("named_struct('a', {}).a", "{} || 'a'", "array({}, {})", "case when c > 1 then {} end"),
        *("struct({} as n, c)", "{} + {}", "array_append({}, {})", "if({} is null, {}, {})"),
    ],
}  # fmt: skip


def draw_lambda(random: Random, around: dict[str, str] | None = None) -> str:
    """Return a call of a function with a lambda, of which Spark accepts some; perhaps within one
    that has the variables `around`, each with the argument that it is a part of.
    """
    call, result, variables = random.choice(_CALLS)
    usual = _MAPS if "(k," in call else _ARRAYS
    arguments = []
    for _ in range(call.count("{}") - 1):
        argument = random.choice(usual if random.random() < 0.9 else [*_MAPS, *_ARRAYS, "c", "0"])
        if around and random.random() < 0.5:
            argument = random.choice(list(around)) + random.choice(["", ".tags", ".w"])
        arguments.append(argument)
    inside = dict(around or {})
    for name, place in variables.items():
        inside[name] = "" if place is None or place >= len(arguments) else arguments[place]
    return call.format(*arguments, _draw_body(random, result, inside))


def _draw_body(random: Random, result: str, variables: dict[str, str]) -> str:
    if len(variables) < 4 and random.random() < 0.15:
        return draw_lambda(random, variables)
    shape = random.choice(_BODIES[result if random.random() < 0.95 else "any"])
    parts = []
    for _ in range(shape.count("{}")):
        name = random.choice(list(variables))
        usual = _PARTS.get(variables[name], ["{}"])
        chosen = random.choice(usual if random.random() < 0.85 else _OF_VARIABLE)
        part = chosen.format(name.upper() if random.random() < 0.1 else name)
        parts.append(random.choice(_LEAVES) if random.random() < 0.1 else part)
    return shape.format(*parts)


def draw(random: Random, depth: int = 0) -> str:
    """Return an expression; Spark accepts about half of them."""
    if depth > 2 or (depth and random.random() < 0.5):
        return random.choice(_LEAVES)
    shape = random.choice(_SHAPES)
    return shape.format(*[draw(random, depth + 1) for _ in range(shape.count("{}"))])
