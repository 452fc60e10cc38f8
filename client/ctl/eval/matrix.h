// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace kvtier::ctl::eval {

// A dense matrix in FP64, row-major. FP64 so that nothing but the method under test rounds.
// Thread-compatible.
class Matrix {
 public:
  Matrix() = default;
  Matrix(size_t rows, size_t cols) : rows_(rows), cols_(cols), data_(rows * cols) {}

  size_t rows() const { return rows_; }
  size_t cols() const { return cols_; }
  std::span<double> Row(size_t row) { return std::span(data_).subspan(row * cols_, cols_); }
  std::span<const double> Row(size_t row) const {
    return std::span(data_).subspan(row * cols_, cols_);
  }
  std::span<double> values() { return data_; }
  std::span<const double> values() const { return data_; }

  Matrix Transposed() const {
    Matrix result(cols_, rows_);
    for (size_t row = 0; row < rows_; ++row) {
      for (size_t col = 0; col < cols_; ++col) result.data_[col * rows_ + row] = Row(row)[col];
    }
    return result;
  }

  // The first `row_count` rows. Requires: row_count <= rows().
  Matrix FirstRows(size_t row_count) const {
    Matrix result(row_count, cols_);
    for (size_t i = 0; i < result.data_.size(); ++i) result.data_[i] = data_[i];
    return result;
  }

 private:
  size_t rows_ = 0;
  size_t cols_ = 0;
  std::vector<double> data_;
};

}  // namespace kvtier::ctl::eval
