"""WebShop: find a product in a shop, choose its options and buy it, as an instruction asks."""
