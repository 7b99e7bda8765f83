"""The color words by which options are matched.

A fact of the original (``web_agent_site/engine/normalize.py`` of princeton-nlp/WebShop), needed for equal
rewards: the first of these that occurs anywhere in a value replaces the whole value, so their order matters.
"""

_WORDS = """
alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy
camel camo caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral
cranberry cream crystal dark denim eggplant elephant espresso fuchsia gold granite grape graphite grass
gray green grey heather indigo ivory ivy khaki lavender lemon leopard light lilac lime magenta maroon
mauve merlot midnight mint mocha multicolor mushroom mustard natural navy nude olive orange peach pewter
pink plum purple rainbow red rose royal rust sand sapphire seashell silver skull slate steel stone
stonewash sunflower tan taupe teal tiger turquoise violet walnut wheat white wine yellow
"""
COLORS: tuple[str, ...] = tuple(_WORDS.split())


def color_in(value: str) -> str:
    """The first color word within a value, or the value itself without one."""
    return next((color for color in COLORS if color in value), value)
