/* SPDX-License-Identifier: Apache-2.0
 *
 * kvtier/kvtier.h is C99 with all its warnings, and complete on its own. Compiled, and
 * called by nobody. */
#include "kvtier/kvtier.h"

int header_is_c(kvtier_error* error);
int header_is_c(kvtier_error* error) {
  kvtier_client* client = NULL;
  const kvtier_options options = {sizeof(options), "/run/kvtierd", "engine", 0, 0, 0};
  return kvtier_connect(&options, &client, error);
}
