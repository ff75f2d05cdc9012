"""Operations on all that a lake stores: delete, expire, rename, repartition."""
