"""The functions of Spark 4.3 with their counts of arguments, which a test compares with Spark's own list.

"1" means one, "1-3" one to three, "2+" two or more, "2,6" two or six. "?" is not checked: the name has other syntax too
("trim(both …)", "in (…)", a type), or Spark does not document the count.
"""

from __future__ import annotations

_FUNCTIONS = {
    "0": """cume_dist curdate current_catalog current_database current_date current_path current_schema
        current_timezone current_user e input_file_block_length input_file_block_start input_file_name
        monotonically_increasing_id pi row_number session_user spark_partition_id user version""",
    "0+": """array arrays_zip coalesce concat concat_ws count dense_rank elt format_string greatest grouping_id
        hash java_method json_tuple least map map_concat named_struct parse_url percent_rank printf rank
        reflect stack struct try_parse_url try_reflect variant_delete xxhash64""",
    "0-1": """current_time current_timestamp localtime localtimestamp now ntile rand randn random uuid""",
    "0-2": """make_ym_interval mode unix_timestamp""",
    "0-4": """lag lead make_dt_interval""",
    "0-7": """make_interval""",
    "1": """abs acos acosh array_agg array_compact array_distinct array_max array_min array_size ascii asin
        asinh atan atanh avg base64 bigint bin binary bit_and bit_count bit_length bit_or bit_xor
        bitmap_and_agg bitmap_bit_position bitmap_bucket_number bitmap_construct_agg bitmap_count
        bitmap_or_agg bool_and bool_or boolean cardinality cbrt char char_length character_length chr
        collation collect_list collect_set collect_union cos cosh cot count_if crc32 csc date
        date_from_unix_date day dayname dayofmonth dayofweek dayofyear degrees double exp explode
        explode_outer expm1 factorial flatten float from_base32 grouping hex hll_sketch_estimate initcap
        inline inline_outer int is_valid_utf8 is_valid_variant is_variant_null isnan isnotnull isnull
        json_array_length json_object_keys kll_sketch_get_n_bigint kll_sketch_get_n_double
        kll_sketch_get_n_float kll_sketch_to_string_bigint kll_sketch_to_string_double
        kll_sketch_to_string_float kurtosis last_day lcase len length ln log10 log1p log2 lower luhn_check
        make_valid_utf8 map_entries map_from_entries map_keys map_values max md5 mean measure median min
        month monthname negative nullifzero octet_length parse_json posexplode posexplode_outer positive
        quarter quote radians raise_error reverse rint schema_of_variant schema_of_variant_agg sec sha sha1
        sign signum sin sinh size skewness smallint soundex space sqrt st_geogfromwkb st_srid std stddev
        stddev_pop stddev_samp string sum tan tanh theta_intersection_agg theta_sketch_estimate time
        time_from_micros time_from_millis time_from_seconds time_to_micros time_to_millis time_to_seconds
        timestamp timestamp_micros timestamp_millis timestamp_nanos timestamp_seconds tinyint to_base32
        to_variant_object try_avg try_parse_json try_sum try_url_decode try_validate_utf8
        tuple_sketch_estimate_double tuple_sketch_estimate_integer tuple_sketch_theta_double
        tuple_sketch_theta_integer typeof ucase unbase64 unhex unix_date unix_micros unix_millis unix_nanos
        unix_seconds upper url_decode url_encode validate_utf8 var_pop var_samp variance vector_avg
        vector_sum weekday weekofyear window_time year zeroifnull""",
    "1+": """hour minute second""",
    "1,2,3,6,7": """make_timestamp try_make_timestamp""",
    "1-2": """any_value approx_count_distinct approx_top_k_accumulate approx_top_k_combine approx_top_k_estimate
        array_sort assert_true bround btrim ceil ceiling counter_diff first first_value floor from_unixtime
        hll_sketch_agg hll_union_agg kll_merge_agg_bigint kll_merge_agg_double kll_merge_agg_float
        kll_sketch_agg_bigint kll_sketch_agg_double kll_sketch_agg_float last last_value log ltrim randstr
        round rtrim schema_of_avro schema_of_csv schema_of_json schema_of_xml shuffle sort_array st_asbinary
        st_geomfromwkb theta_sketch_agg theta_union_agg to_avro to_binary to_csv to_date to_json to_time
        to_timestamp to_timestamp_ltz to_timestamp_ntz to_unix_timestamp to_xml try_to_binary try_to_date
        try_to_time try_to_timestamp tuple_intersection_agg_double tuple_intersection_agg_integer
        tuple_sketch_summary_double tuple_sketch_summary_integer variant_strip_nulls vector_norm
        vector_normalize""",
    "1-3": """approx_top_k sentences str_to_map tuple_union_agg_double tuple_union_agg_integer""",
    "1-5": """mask""",
    "1-7": """try_make_interval""",
    "2": """add_months array_append array_contains array_except array_intersect array_position array_prepend
        array_remove array_repeat array_union arrays_overlap atan2 bit_get contains corr covar_pop
        covar_samp date_format date_part date_sub date_trunc datepart element_at encode endswith equal_null
        find_in_set forall format_number from_utc_timestamp get get_json_object getbit histogram_numeric
        hypot ifnull jaro_winkler_similarity kll_sketch_get_quantile_bigint kll_sketch_get_quantile_double
        kll_sketch_get_quantile_float kll_sketch_get_rank_bigint kll_sketch_get_rank_double
        kll_sketch_get_rank_float kll_sketch_merge_bigint kll_sketch_merge_double kll_sketch_merge_float
        left map_contains_key map_filter map_from_arrays nanvl next_day nullif nvl pmod pow power
        regexp_count regexp_like regexp_substr regr_avgx regr_avgy regr_count regr_intercept regr_r2
        regr_slope regr_sxx regr_sxy regr_syy repeat right session_window sha2 shiftleft shiftright
        shiftrightunsigned st_setsrid startswith theta_difference theta_intersection time_trunc to_char
        to_number to_utc_timestamp to_varchar transform transform_keys transform_values trunc try_add
        try_divide try_element_at try_mod try_multiply try_subtract try_to_number tuple_difference_double
        tuple_difference_integer tuple_difference_theta_double tuple_difference_theta_integer
        vector_cosine_similarity vector_inner_product vector_l2_distance xpath xpath_boolean xpath_double
        xpath_float xpath_int xpath_long xpath_number xpath_short xpath_string""",
    "2+": """decode""",
    "2,3,6,7": """make_timestamp_ltz try_make_timestamp_ltz""",
    "2,6": """make_timestamp_ntz try_make_timestamp_ntz""",
    "2-3": """approx_percentile array_join convert_timezone from_avro from_csv from_json from_xml hll_union hmac
        levenshtein locate lpad max_by min_by months_between nth_value percentile percentile_approx
        regexp_extract regexp_extract_all regexp_instr replace rpad sequence split theta_union time_bucket
        try_variant_get tuple_intersection_double tuple_intersection_integer tuple_intersection_theta_double
        tuple_intersection_theta_integer uniform variant_get""",
    "2-4": """from_protobuf instr to_protobuf tuple_sketch_agg_double tuple_sketch_agg_integer tuple_union_double
        tuple_union_integer tuple_union_theta_double tuple_union_theta_integer window""",
    "2-5": """aes_decrypt try_aes_decrypt""",
    "2-6": """aes_encrypt""",
    "3": """array_insert conv if make_date make_time map_zip_with nvl2 slice split_part substring_index
        translate try_variant_array_append try_variant_insert variant_array_append variant_insert zip_with""",
    "3-4": """aggregate reduce regexp_replace try_variant_set variant_set""",
    "4": """count_min_sketch width_bucket""",
    "?": """group all and any between case cast collate date_add date_diff dateadd datediff decimal distinct div
        escape every exists extract filter ilike in interval is like listagg mod not or overlay
        percentile_cont percentile_disc position regexp rlike some string_agg substr substring time_diff
        timediff timestampadd timestampdiff trim try_cast values when""",
}


def _allowed_counts(text: str) -> tuple[frozenset[int] | None, int]:
    """Return the allowed counts of arguments, or None and the minimum."""
    if text.endswith("+"):
        return None, int(text[:-1])
    first, _, last = text.partition("-")
    counts = map(int, text.split(",")) if not last else range(int(first), int(last) + 1)
    return frozenset(counts), 0


SPARK_FUNCTIONS = frozenset(name for names in _FUNCTIONS.values() for name in names.split())
"""The names of all functions of Spark SQL."""
_COUNTS = {
    name: (counts, _allowed_counts(counts))
    for counts, names in _FUNCTIONS.items()
    if counts != "?"
    for name in names.split()
}


def argument_count_problem(function: str, given: int | None) -> str:
    """Return "upper() takes 1 argument, and gets 2", or "" where the count is allowed or unknown."""
    if given is None or function not in _COUNTS:
        return ""
    counts_text, (counts, least) = _COUNTS[function]
    if given in counts if counts is not None else given >= least:
        return ""
    right = f"{least} or more" if counts is None else counts_text.replace("-", " to ").replace(",", " or ")
    return f"{function}() takes {right} argument{'' if counts_text == '1' else 's'}, and gets {given}"


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


AGGREGATE_FUNCTIONS = _names(
    """any any_value approx_count_distinct approx_percentile approx_top_k approx_top_k_accumulate approx_top_k_combine
    array_agg avg bit_and bit_or bit_xor bitmap_and_agg bitmap_construct_agg bitmap_or_agg bool_and bool_or collect_list
    collect_set collect_union corr count count_if count_min_sketch counter_diff covar_pop covar_samp cume_dist
    dense_rank every first first_value grouping grouping_id histogram_numeric hll_sketch_agg hll_union_agg
    kll_merge_agg_bigint kll_merge_agg_double kll_merge_agg_float kll_sketch_agg_bigint kll_sketch_agg_double
    kll_sketch_agg_float kurtosis lag last last_value lead listagg max max_by mean measure median min min_by mode
    nth_value ntile percent_rank percentile percentile_approx percentile_cont percentile_disc rank regr_avgx regr_avgy
    regr_count regr_intercept regr_r2 regr_slope regr_sxx regr_sxy regr_syy row_number schema_of_variant_agg skewness
    some std stddev stddev_pop stddev_samp string_agg sum theta_intersection_agg theta_sketch_agg theta_union_agg
    try_avg try_sum tuple_intersection_agg_double tuple_intersection_agg_integer tuple_sketch_agg_double
    tuple_sketch_agg_integer tuple_union_agg_double tuple_union_agg_integer var_pop var_samp variance"""
)
"""Functions that combine several records: aggregates, and window functions, which need `over (…)`."""
GENERATOR_FUNCTIONS = _names(
    "explode explode_outer inline inline_outer json_tuple posexplode posexplode_outer stack variant_explode "
    "variant_explode_outer"
)
"""Functions that return several records for one."""
